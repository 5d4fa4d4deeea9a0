"""Runs cases on engines of the V1 runner."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.engine.conftest import run_engine
from tests.engine.law.bias import draw_from_draft
from tests.engine.law.engines import run_law_engine
from tests.engine.law.judge import Judged, Verdict, judge
from tests.engine.law.models import write_law_pair
from tests.engine.law.traffic import FEATURES, draw_requests
from tests.engine.made_up import make_up_costs
from tests.engine.tiny_models import (
    write_eagle3_head,
    write_eagle_head,
    write_markov_llama,
    write_mimo,
    write_tokenizer,
)

NUM_EACH = 18
"""Requests of each kind in a batch; all kinds together make 5,000 tokens."""

FEW_BLOCKS = 40
"""Where KV blocks are to run short."""

SHARE = 0.05
"""Of the tokens at verified positions, how many the controls draw from the draft."""

SAMPLED = {"draft_sample_method": "probabilistic"}

ARGMAX = {"draft_sample_method": "greedy"}

PAIRS: dict[str, dict[str, Any]] = {
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


@contextmanager
def start(folder, drafter):
    """Start the engine on which all cases of a drafter are run."""
    with run_law_engine(
        run_engine,
        *write_models(folder, drafter),
        method="draft_model" if drafter in PAIRS else drafter,
        speculative=ARGMAX if drafter == "argmax" else SAMPLED,
        max_num_seqs=96,
        max_num_batched_tokens=2048,
    ) as engine:
        yield engine


@dataclass
class Outcome:
    """What a case brought.

    Attributes:
        judged: Every request.
        verdict: The evidence.
        counters: The engine's, of this case.
        num_one_hot: Drafts verified without their law.
        num_preempted: Requests that lost their KV blocks.
    """

    judged: list[Judged]
    verdict: Verdict
    counters: dict[str, Any]
    num_one_hot: int
    num_preempted: int


def draw_some_from_draft(_):
    """Bias the rejection sampler of the V1 runner."""
    from vllm.v1.sample import rejection_sampler

    return draw_from_draft(rejection_sampler, SHARE, seed=1)


def score_by_drawn_token(engine):
    """Rank drafts as the paper does: by what was drawn."""
    from tests.engine.law.biased_drafters import DrawnTokenDrafter, draft_as

    return draft_as(engine.engine.runner.drafter, DrawnTokenDrafter)


def ignore_grammars(engine):
    """Draft requests with a grammar as if they had none."""
    from tests.engine.law.biased_drafters import GrammarBlindDrafter, draft_as

    return draft_as(engine.engine.runner.drafter, GrammarBlindDrafter)


def run_case(
    engine,
    case,
    seed,
    *,
    bias=None,
    num_each=NUM_EACH,
    features=tuple(FEATURES),
    few_blocks=FEW_BLOCKS,
    prepare=make_drafts_pay,
):
    """Run a case on the engine of its drafter.

    Args:
        engine: From `start`.
        case: The case.
        seed: Of requests and engine.
        bias: Makes a control of it.
        num_each: Requests of each kind.
        features: The kinds.
        few_blocks: Left where KV blocks run short.
        prepare: Makes up what the policies that look at prices believe.
    """
    engine.set_policy(case.policy, prepare)
    requests = draw_requests(
        seed,
        num_each,
        long_prompts=case.long_prompts,
        classes=case.classes,
        features=features,
    )
    with ExitStack() as stack:
        if case.gaps:
            stack.enter_context(engine.break_off_drafting())
        if case.tight:
            stack.enter_context(engine.engine.hold_blocks(few_blocks))
        if bias is not None:
            stack.enter_context(bias(engine))
        judged = engine.run(requests, seed)
    return Outcome(
        judged,
        judge(judged),
        engine.engine.scheduler.snapshot(),
        engine.record.num_one_hot,
        engine.record.num_preempted,
    )
