"""At temperature 0 speculation changes no token id.

In float32 that is exact. In bf16 a step that verifies five tokens may round differently
from five steps, and flip the argmax of a near-tie; what follows a flip differs freely,
but every divergence has to start at one. Whether kernels round differently depends on
the machine, so the test asks for more: *every* token an engine emits is the target's
most likely one, given what it emitted before, up to bf16 rounding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import run_engine
from tests.engine.made_up import make_up_costs
from tests.engine.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_REQUESTS = 240

TIGHT_ENGINE = {
    # Prompts are cut in chunks, which then share steps with running requests.
    "max_num_batched_tokens": 128,
    # Room for about half of the running requests: some are preempted and start over.
    "kv_cache_memory_bytes": 4 << 20,
    "max_model_len": 256,
}


FEATURES = (
    {},
    {"ignore_eos": True},
    {"extra_args": {"speculative_decoding": "off"}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "ignore_eos": True},
    {"min_tokens": 5, "stop_token_ids": list(range(3, 20))},
    {"allowed_token_ids": list(range(10, 40))},
    {"logprobs": 3},
)
"""Settings that touch verification; the jobs take them in turn."""


@dataclass(frozen=True)
class Job:
    """One request and the engine step before which it arrives."""

    prompt: tuple[int, ...]
    settings: dict[str, Any]
    arrival_step: int


def make_jobs(seed=0):
    """Draw prompts, settings and arrivals; a third of the prompts share a prefix."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB_SIZE, size=80).tolist()
    jobs = []
    step = 0
    for number in range(NUM_REQUESTS):
        # At most four arrive before one step, so that the batch turns over.
        step += int(rng.integers(0, 3)) if number % 4 == 0 else 0
        length = int(rng.integers(1, 60)) if number % 3 else int(rng.integers(60, 150))
        own = rng.integers(3, VOCAB_SIZE, size=length).tolist()
        prefix = shared[: int(rng.integers(16, 80))] if number % 3 == 1 else []
        settings = {
            **FEATURES[number % len(FEATURES)],
            "max_tokens": int(rng.integers(5, 60)),
        }
        jobs.append(Job(tuple(prefix + own), settings, step))
    return jobs


def run_jobs(engine, jobs):
    """Feed jobs to an engine as they arrive, between its steps."""
    from vllm import SamplingParams

    waiting = list(enumerate(jobs))
    llm_engine = engine.llm.llm_engine
    finished = {}
    step = 0
    while waiting or llm_engine.has_unfinished_requests():
        while waiting and waiting[0][1].arrival_step <= step:
            number, job = waiting.pop(0)
            llm_engine.add_request(
                str(number),
                {"prompt_token_ids": list(job.prompt)},
                SamplingParams(temperature=0.0, detokenize=False, **job.settings),
            )
        for output in llm_engine.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    return finished


@dataclass
class Batches:
    """Which situations the steps of an engine went through."""

    num_steps_with_chunks: int = 0
    num_preempted: int = 0


def spy_on_batches(engine):
    """Count the situations that the jobs are meant to produce."""
    seen = Batches()
    schedule = engine.scheduler.schedule

    def spying_schedule(*args):
        output = schedule(*args)
        chunks = [
            engine.scheduler.requests[req_id].is_prefill_chunk
            for req_id in output.num_scheduled_tokens
        ]
        seen.num_steps_with_chunks += any(chunks) and not all(chunks)
        seen.num_preempted += len(output.preempted_req_ids or ())
        return output

    engine.scheduler.schedule = spying_schedule
    return seen


@pytest.fixture(scope="module")
def jobs():
    """The same work for every engine."""
    return make_jobs()


@pytest.fixture(scope="module")
def expected(tiny_pair, jobs):
    """The token ids without speculation."""
    with run_engine(tiny_pair[0], policy="none", **TIGHT_ENGINE) as engine:
        return run_jobs(engine, jobs)


@pytest.mark.parametrize(
    ("policy", "draft_tokens", "extra_draft_tokens"),
    [
        ("fixed", 1, 0),
        ("fixed", 4, 0),
        ("tetris", 1, 1),
        ("tetris", 2, 3),
        ("dynamic", 4, 0),
        ("goodput", 4, 0),
    ],
)
def test_float32_token_ids_equal_those_without_speculation(
    policy, draft_tokens, extra_draft_tokens, tiny_pair, jobs, expected
):
    with run_engine(
        *tiny_pair,
        policy=policy,
        draft_tokens=draft_tokens,
        extra_draft_tokens=extra_draft_tokens,
        **TIGHT_ENGINE,
    ) as engine:
        if policy in ("dynamic", "goodput"):
            make_up_costs(engine)
        seen = spy_on_batches(engine)
        outputs = run_jobs(engine, jobs)
        counters = engine.scheduler.counters

    assert len(outputs) == NUM_REQUESTS
    assert outputs == expected
    assert seen.num_steps_with_chunks > 0
    assert not counters.num_fallbacks
    assert counters.num_accepted_tokens > NUM_REQUESTS
    assert counters.num_accepted_tokens < counters.num_verified_tokens
    assert counters.num_cut_tokens["opt_out"] > 0
    assert counters.num_cut_tokens["min_tokens"] > 0
    # Goodput lets in as many as will fit to their end; the others let vLLM find out.
    assert (seen.num_preempted > 0) == (policy != "goodput")
    if policy in ("tetris", "goodput"):
        assert counters.num_cut_tokens["budget"] > NUM_REQUESTS


def test_a_block_that_reaches_min_tokens_may_end_with_a_stop_token(tiny_pair):
    """VLLM bars stop tokens from the bonus token by where its block starts."""
    from vllm import SamplingParams

    target = tiny_pair[0]
    prompt = {"prompt_token_ids": [5, 8, 13]}
    with run_engine(target, policy="none") as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = engine.llm.generate(prompt, greedy, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    stop_at = next(i for i in range(3, 8) if tokens[i] not in tokens[:i])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=8,
        ignore_eos=True,
        min_tokens=stop_at - 1,
        stop_token_ids=[tokens[stop_at]],
    )
    # The target drafts for itself: whatever is verified is accepted.
    with run_engine(target, target, policy="fixed", draft_tokens=stop_at) as engine:
        (output,) = engine.llm.generate(prompt, params, use_tqdm=False)
        counters = engine.scheduler.counters

    assert list(output.outputs[0].token_ids) == tokens[: stop_at + 1]
    assert counters.num_accepted_tokens == counters.num_verified_tokens > 0
    assert counters.num_cut_tokens["min_tokens"] > 0


BF16_ROUNDING = 0.425 * 2.0**-8
"""Root mean square relative error of one rounding to bf16's 8 significant bits: uniform
over at most 2**-8 of the value for a mantissa of 1 and half of that towards 2; with
log-uniform mantissas m, sqrt(E[m**-2] / 3) = sqrt(0.375 / ln 2 / 3) = 0.425 of it."""

ROUNDINGS_PER_LAYER = 11
"""Norm, QKV, rotation, attention, output projection, residual; norm, gate and up,
activation, down, residual."""

NEAR_TIE_SIGMAS = 6.0
"""Gap between two logits that rounding can close, in standard deviations of the gap's
error: one in 10,000 errors is larger than 4, and the noise level is an estimate."""


@dataclass(frozen=True)
class Rounding:
    """The target in float32, to tell what bf16 may do to its choices.

    If every rounding turns the hidden state by `BF16_ROUNDING` in a random direction,
    n of them add up to sqrt(n) times that, and since a logit is the hidden state's
    projection on one of many random-looking directions, its error is that multiple of
    the logits' own standard deviation. A gap between two logits errs by sqrt(2) more.
    """

    model: Any

    @classmethod
    def of(cls, target):
        """Load a target with the weights that a bf16 engine computes with."""
        weights = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        return cls(weights.float())

    @torch.no_grad()
    def shortfall(self, prompt, tokens):
        """How far each token's logit falls short of the largest one.

        Returns:
            `[num_tokens]`, in standard deviations of the error of such a gap; 0 where
            the token is the float32 argmax given prompt and preceding tokens.
        """
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        num_roundings = ROUNDINGS_PER_LAYER * self.model.config.num_hidden_layers + 2
        noise = BF16_ROUNDING * num_roundings**0.5 * logits.std(dim=-1) * 2**0.5
        gaps = ((logits.amax(dim=-1) - chosen) / noise).numpy()
        return gaps


def decode_bf16(target, draft, prompts, **policy):
    """Complete prompts in bf16, greedily."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False
    )
    with run_engine(target, draft, dtype="bfloat16", **policy) as engine:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            params,
            use_tqdm=False,
        )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def bf16_prompts():
    """200 prompts of different lengths."""
    rng = np.random.default_rng(1)
    return [
        rng.integers(3, VOCAB_SIZE, size=1 + number % 60).tolist()
        for number in range(200)
    ]


@pytest.fixture(scope="module")
def bf16_expected(tiny_pair, bf16_prompts):
    """The bf16 token ids without speculation."""
    return decode_bf16(tiny_pair[0], None, bf16_prompts)


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "fixed", "draft_tokens": 4},
        {"policy": "tetris", "draft_tokens": 2, "extra_draft_tokens": 2},
    ],
    ids=["fixed", "tetris"],
)
def test_bf16_divergences_start_at_near_ties(
    policy, tiny_pair, bf16_prompts, bf16_expected, record_property
):
    rounding = Rounding.of(tiny_pair[0])
    outputs = decode_bf16(*tiny_pair, bf16_prompts, **policy)

    shortfalls = np.concatenate(
        [
            rounding.shortfall(prompt, tokens)
            for prompt, tokens in zip(bf16_prompts, outputs, strict=True)
        ]
    )
    num_diverged = sum(a != b for a, b in zip(outputs, bf16_expected, strict=True))
    record_property("num_diverged", num_diverged)
    record_property("num_flips_against_float32", int((shortfalls > 0).sum()))
    record_property("largest_shortfall_sigmas", float(shortfalls.max()))
    assert shortfalls.max() < NEAR_TIE_SIGMAS
    # Rounding does flip near-ties of this model, or nothing was tested.
    assert (shortfalls > 0).sum() > 10
    for prompt, tokens, others in zip(
        bf16_prompts, outputs, bf16_expected, strict=True
    ):
        if tokens == others:
            continue
        start = next(i for i, token in enumerate(tokens) if token != others[i])
        both = [
            rounding.shortfall(prompt, ids[: start + 1]) for ids in (tokens, others)
        ]
        assert both[0][-1] < NEAR_TIE_SIGMAS
        assert both[1][-1] < NEAR_TIE_SIGMAS


def test_tokens_the_target_would_not_choose_are_no_near_ties(tiny_pair, bf16_prompts):
    """The control: what comes out if every draft token is accepted."""
    target, draft = tiny_pair
    rounding = Rounding.of(target)
    outputs = decode_bf16(draft, None, bf16_prompts)

    shortfalls = [
        rounding.shortfall(prompt, tokens)
        for prompt, tokens in zip(bf16_prompts, outputs, strict=True)
    ]
    wrong = np.concatenate(shortfalls)
    wrong = wrong[wrong > 0]
    assert np.mean(wrong >= NEAR_TIE_SIGMAS) > 0.8
    assert np.mean([gaps.max() >= NEAR_TIE_SIGMAS for gaps in shortfalls]) > 0.95
