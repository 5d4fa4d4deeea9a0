"""Runs cases on engines of the V1 runner, one engine for all cases of a drafter."""

import itertools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.engine.conftest import BLOCK, run_engine
from tests.engine.law.bias import draw_from_draft
from tests.engine.law.judge import Judged, Verdict, join, judge
from tests.engine.law.models import load_reference, write_law_pair
from tests.engine.law.recorder import Record, record
from tests.engine.law.traffic import CHUNK, CLASSES, FEATURES, draw_requests
from tests.engine.made_up import make_up_costs
from tests.engine.tiny_models import (
    write_eagle3_head,
    write_eagle_head,
    write_markov_llama,
    write_mimo,
    write_tokenizer,
)

DEPTH = 8

POLICIES = {
    "fixed": {"draft_tokens": DEPTH},
    "dynamic": {"max_draft_tokens": DEPTH},
    "tetris": {"draft_tokens": 3, "max_draft_tokens": DEPTH},
    "goodput": {"max_draft_tokens": DEPTH},
}

DEPTHS_WITH_GAPS = (DEPTH, DEPTH, 0, 0, 3, DEPTH, 0, DEPTH, 1, 0, 0, 0)
"""How drafting is broken off: at depth 0 the drafter is left out; it resumes cold."""

NUM_EACH = 18
"""Requests of each kind in a batch; all kinds together make 5,000 tokens."""

FEW_BLOCKS = 40
"""Where KV blocks are to run short."""

SHARE = 0.05
"""Of the tokens at verified positions, how many the controls draw from the draft."""

SAMPLED = {"draft_sample_method": "probabilistic"}

ARGMAX = {"draft_sample_method": "greedy"}

PAIRS = {
    "draft_model": {},
    "argmax": {},
    "perfect": {"noise": 0.0},
    "noisy": {"noise": 0.1},
    "confused": {"confused_every": 3},
}
"""Drafters that are draft models, and how their pairs are written."""

make_drafts_pay = partial(make_up_costs, draft_ms=(0.02, 0.1), target_ms=(60.3, 100.0))
"""Prices at which the drafts of a drafter that is often wrong pay for some batches."""


def write_models(folder, drafter):
    """Write the target and, where it is not a part of it, the draft of a drafter."""
    if drafter in PAIRS:
        return write_law_pair(folder, **PAIRS[drafter])
    if drafter == "mtp":
        target, head = write_mimo(folder / "target"), None
    else:
        target, head = write_markov_llama(folder / "target"), None
    if drafter == "eagle":
        head = write_eagle_head(folder / "head")
    if drafter == "eagle3":
        head = write_eagle3_head(folder / "head", target)
    write_tokenizer(target)
    return target, head


@dataclass
class LawEngine:
    """An engine as deep as any policy drafts here, every block of which is recorded.

    Attributes:
        engine: The engine.
        reference: Its target, in float64.
        record: Of the latest batch.
    """

    engine: Any
    reference: Any
    record: Record


@contextmanager
def run_law_engine(start, target, draft, **options):
    """Start an engine by `run_engine` or one like it, with more of its options."""
    with start(
        target,
        draft,
        policy="fixed",
        draft_tokens=DEPTH,
        classes=CLASSES,
        skip_tokenizer_init=False,
        max_model_len=4 * BLOCK,
        block_size=BLOCK,
        long_prefill_token_threshold=CHUNK,
        **options,
    ) as engine:
        yield LawEngine(engine, load_reference(target), record(engine))


def start(folder, drafter):
    """Start the engine on which all cases of a drafter are run."""
    return run_law_engine(
        run_engine,
        *write_models(folder, drafter),
        method="draft_model" if drafter in PAIRS else drafter,
        speculative=ARGMAX if drafter == "argmax" else SAMPLED,
        max_num_seqs=96,
        max_num_batched_tokens=2048,
    )


def draw_some_from_draft(_):
    """Bias the rejection sampler of the V1 runner."""
    from vllm.v1.sample import rejection_sampler

    return draw_from_draft(rejection_sampler, SHARE, seed=1)


def score_by_drawn_token(engine):
    """Rank drafts as the paper does: by the probability of the token drawn."""
    drafter = engine.engine.runner.drafter
    sample = drafter._sample_from_logits

    def sample_and_score(logits, sampling_metadata):
        drafts, probs = sample(logits, sampling_metadata)
        if probs is not None:
            drawn = probs.gather(-1, drafts.unsqueeze(-1))
            drafter._confidences[-1] = drawn.squeeze(-1)
        return drafts, probs

    return patch.object(drafter, "_sample_from_logits", sample_and_score)


def ignore_grammars(engine):
    """Sample the drafts of requests with a grammar like all others."""
    drafter = engine.engine.runner.drafter
    propose = drafter.propose

    def propose_blindly(*args, **kwargs):
        drafter._grammar_rows = None
        return propose(*args, **kwargs)

    return patch.object(drafter, "propose", propose_blindly)


@dataclass
class Outcome:
    """What a case brought: every request, the evidence, the engine's counters.

    Attributes:
        num_one_hot: Drafts verified without their law.
        num_preempted: Requests that lost their KV blocks.
    """

    judged: list[Judged]
    verdict: Verdict
    counters: dict[str, Any]
    num_one_hot: int
    num_preempted: int


def run_case(
    law,
    case,
    seed,
    *,
    bias=None,
    num_each=NUM_EACH,
    features=tuple(FEATURES),
    few_blocks=FEW_BLOCKS,
    prepare=make_drafts_pay,
):
    """Run a case on the engine of its drafter, all requests in one batch.

    Args:
        law: From `start`.
        case: The case.
        seed: Of requests, and of whatever the engine draws.
        bias: Makes a control of it.
        num_each: Requests of each kind.
        features: The kinds.
        few_blocks: Left where KV blocks run short.
        prepare: Makes up what the policies that look at prices believe: on models as
            small as these, drafting never pays.
    """
    engine = law.engine
    engine.set_policy(case.policy, **POLICIES[case.policy])
    if case.policy in ("dynamic", "goodput"):
        prepare(engine)
    kinds = {"long_prompts": case.long_prompts, "classes": case.classes}
    requests = draw_requests(seed, num_each, features=features, **kinds)
    law.record.clear()
    torch.manual_seed(seed)
    with ExitStack() as stack:
        if case.gaps:
            depths = itertools.cycle(DEPTHS_WITH_GAPS)
            scheduler = engine.scheduler
            stack.enter_context(
                patch.object(scheduler, "_choose_depth", lambda _: next(depths))
            )
        if case.tight:
            stack.enter_context(engine.hold_blocks(few_blocks))
        if bias is not None:
            stack.enter_context(bias(law))
        outputs = engine.llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in requests],
            [request.make_params() for request in requests],
            use_tqdm=False,
        )
    judged = join(
        requests,
        [output.outputs[0].token_ids for output in outputs],
        [law.record.blocks.get(one.request_id, []) for one in outputs],
        law.reference,
    )
    return Outcome(
        judged,
        judge(judged),
        engine.scheduler.snapshot(),
        law.record.num_one_hot,
        law.record.num_preempted,
    )
