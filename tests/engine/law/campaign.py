"""Runs cases on engines of the V1 runner, and the parts of it that any runner shares.

One engine serves for many cases: its policy, room and traffic change between batches.
"""

import itertools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from tests.engine.conftest import BLOCK, Engine, run_engine
from tests.engine.law.bias import draw_from_draft
from tests.engine.law.judge import Judged, Verdict, join, judge
from tests.engine.law.models import load_reference, write_law_pair
from tests.engine.law.recorder import Record, record
from tests.engine.law.traffic import CHUNK, CLASSES, FEATURES, draw_requests
from tests.engine.made_up import make_up_costs
from tests.engine.tiny_models import write_heads, write_tokenizer

DEPTH = 8
"""Drafts of a request, at most; engines may be started for fewer."""

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
    target, head = write_heads(folder)[drafter]
    write_tokenizer(target)
    return target, head


@dataclass
class LawEngine:
    """An engine, its target in float64, and a record of its latest batch.

    It drafts at most `depth` tokens of a request.
    """

    engine: Engine
    reference: PreTrainedModel
    record: Record
    depth: int

    def break_off_drafting(self):
        """Draft as deep as `DEPTHS_WITH_GAPS` says, whatever the policy wants."""
        depths = itertools.cycle(min(one, self.depth) for one in DEPTHS_WITH_GAPS)
        scheduler, choose = self.engine.scheduler, lambda _num_reqs: next(depths)
        return patch.object(scheduler, "_choose_depth", choose)

    def set_policy(self, policy):
        """Take one of `POLICIES`, as deep as the engine drafts."""
        tokens = {name: min(n, self.depth) for name, n in POLICIES[policy].items()}
        self.engine.set_policy(policy, **tokens)

    def run(self, requests, seed):
        """Complete requests in one batch; the seed is of whatever the engine draws."""
        self.record.clear()
        torch.manual_seed(seed)
        prompts = [request.prompt for request in requests]
        params = [request.make_params() for request in requests]
        outputs = self.engine.complete(prompts, params)
        tokens = [output.outputs[0].token_ids for output in outputs]
        blocks = [self.record.blocks.get(one.request_id, []) for one in outputs]
        return join(requests, tokens, blocks, self.reference)


@contextmanager
def run_law_engine(start, target, draft, *, depth=DEPTH, **options):
    """Start an engine, as `start` does, that drafts at most so deep.

    It records its blocks.
    """
    with start(
        target,
        draft,
        policy="fixed",
        draft_tokens=depth,
        classes=CLASSES,
        skip_tokenizer_init=False,
        max_model_len=4 * BLOCK,
        block_size=BLOCK,
        long_prefill_token_threshold=CHUNK,
        **options,
    ) as engine:
        yield LawEngine(engine, load_reference(target), record(engine), depth)


@contextmanager
def start(folder, drafter):
    """Start the engine on which all cases of a drafter are run."""
    with run_law_engine(
        run_engine,
        *write_models(folder, drafter),
        method="draft_model" if drafter in PAIRS else drafter.split()[0],
        speculative=ARGMAX if drafter == "argmax" else SAMPLED,
        max_num_seqs=96,
        max_num_batched_tokens=2048,
    ) as engine:
        yield engine


@dataclass
class Outcome:
    """What a case brought: requests, evidence, and what the engine counted of it."""

    judged: list[Judged]
    verdict: Verdict
    counters: dict[str, Any]
    record: Record


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
    engine.set_policy(case.policy)
    if case.policy in ("dynamic", "goodput"):
        prepare(engine.engine)
    requests = draw_requests(seed, num_each, case, features)
    with ExitStack() as stack:
        if case.gaps:
            stack.enter_context(engine.break_off_drafting())
        if case.tight:
            stack.enter_context(engine.engine.hold_blocks(few_blocks))
        if bias is not None:
            stack.enter_context(bias(engine))
        judged = engine.run(requests, seed)
    counters = engine.engine.scheduler.snapshot()
    return Outcome(judged, judge(judged), counters, replace(engine.record))
