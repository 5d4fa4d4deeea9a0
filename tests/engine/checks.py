"""Drive engines step by step, look at every step, and hold it to its promises.

What takes an engine is a method of `tests.engine.conftest.Engine` as well.
"""

import math
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tests.engine.tiny_models import VOCAB_SIZE

FIRST_ORDINARY_TOKEN = 3
"""Below are padding, beginning and end of text."""

MAX_STEPS = 2000
"""More than any test here takes."""


def greedy(max_tokens=24, **changes):
    """Sampling parameters whose output is a function of the prompt alone."""
    from vllm import SamplingParams

    defaults = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=max_tokens, **{**defaults, **changes})


def draw_prompt(seed, num_tokens):
    """Draw token ids that mean nothing."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ORDINARY_TOKEN, VOCAB_SIZE) for _ in range(num_tokens)]


def draw_prompts(num_prompts, seed=0):
    """Draw prompts of different lengths."""
    return [draw_prompt(seed + i, 5 + 7 * i % 40) for i in range(num_prompts)]


def complete(engine, prompts, params):
    """Complete prompts of token ids in one batch."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return engine.llm.generate(inputs, params, use_tqdm=False)


def summarize(output):
    """Everything a client can tell two completions apart by, but for logprobs."""
    how = output.text, output.finish_reason, output.stop_reason
    return list(output.token_ids), *how


def summarize_all(outputs):
    """Summarize every completion of every request."""
    return [[summarize(completion) for completion in o.outputs] for o in outputs]


def answer(engine, prompts, params):
    """Complete prompts of token ids in one batch, and summarize."""
    return summarize_all(complete(engine, prompts, params))


def check_logprobs(positions, expected):
    """Compare tokens, ranks and log probabilities at every position."""
    assert len(positions) == len(expected) > 0
    for position, reference in zip(positions, expected, strict=True):
        assert position.keys() == reference.keys()
        for token, logprob in position.items():
            assert logprob.rank == reference[token].rank
            other = reference[token].logprob
            assert math.isclose(logprob.logprob, other, abs_tol=1e-4)


@dataclass(frozen=True)
class Arrival:
    """A request that joins at a step."""

    name: str
    prompt: list[int]
    params: Any
    step: int = 0


def drive(engine, arrivals):
    """Step an engine through requests that join; summarize the last output of each."""
    llm_engine = engine.llm.llm_engine
    outputs, step, waiting = {}, 0, list(arrivals)
    while waiting or llm_engine.has_unfinished_requests():
        assert step < MAX_STEPS, "the engine makes no progress"
        for arrival in [a for a in waiting if a.step <= step]:
            waiting.remove(arrival)
            prompt = {"prompt_token_ids": list(arrival.prompt)}
            llm_engine.add_request(arrival.name, prompt, arrival.params)
        for output in llm_engine.step():
            outputs[output.request_id] = summarize(output.outputs[0])
        step += 1
    return outputs


@dataclass
class Step:
    """What one engine step did with drafts, by request name.

    Attributes:
        num_scheduled: Tokens, drafts among them.
        num_drafts: Drafts verified.
        is_chunk: Whether it is a part of a prompt, and not the last.
        num_preempted: Requests that lost their KV blocks.
    """

    num_scheduled: dict[str, int]
    num_drafts: dict[str, int]
    is_chunk: list[bool]
    num_preempted: int
    num_accepted: dict[str, int] = field(default_factory=dict)


@contextmanager
def watch(engine):
    """Record every step, and check that none verifies more than its budget."""
    scheduler = engine.scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output
    steps = []

    def spy_on_schedule(*args, **kwargs):
        output = schedule(*args, **kwargs)
        counts = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        step = Step(
            {name_of(req_id): count for req_id, count in counts.items()},
            {name_of(req_id): len(own) for req_id, own in drafts.items()},
            [scheduler.requests[req_id].is_prefill_chunk for req_id in counts],
            len(output.preempted_req_ids or ()),
        )
        assert sum(step.num_drafts.values()) <= scheduler.counters.last_draft_budget
        steps.append(step)
        return output

    def spy_on_update(scheduler_output, runner_output):
        for req_id in scheduler_output.scheduled_spec_decode_tokens:
            row = runner_output.req_id_to_index[req_id]
            num_sampled = len(runner_output.sampled_token_ids[row])
            steps[-1].num_accepted[name_of(req_id)] = num_sampled - 1
        return update(scheduler_output, runner_output)

    with (
        patch.object(scheduler, "schedule", spy_on_schedule),
        patch.object(scheduler, "update_from_output", spy_on_update),
    ):
        yield steps


def name_of(req_id):
    """Cut off the suffix with which vLLM makes ids unique."""
    return req_id.rpartition("-")[0]


def check_counters(engine):
    """Assert what must hold between the counters of an engine without faults.

    Proposed drafts are verified or cut for a reason; what is left belongs to requests
    that ended before their drafts came up.
    """
    counters = engine.scheduler.counters
    assert counters.num_fallbacks == {}
    num_cut = counters.num_cut_tokens.total() - counters.num_cut_tokens["depth"]
    assert counters.num_proposed_tokens >= counters.num_verified_tokens + num_cut
    assert counters.num_verified_tokens >= counters.num_accepted_tokens
    assert counters.draft_budget_total >= counters.num_verified_tokens
    for total, per_pos in (
        (counters.num_verified_tokens, counters.num_verified_tokens_per_pos),
        (counters.num_accepted_tokens, counters.num_accepted_tokens_per_pos),
    ):
        assert sum(per_pos) == total
        assert per_pos == sorted(per_pos, reverse=True)
    assert counters.num_verified_tokens_per_pos[0] == counters.num_drafts


def check_idle(engine):
    """Assert that an engine without requests remembers none."""
    assert not engine.scheduler.requests
    assert not engine.scheduler._drafts
