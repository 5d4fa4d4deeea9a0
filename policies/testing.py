"""Does a planner keep its contract? For the tests of whoever writes one.

from policies.testing import check_planner

def test_my_planner():
check_planner(lambda limits: MyPlanner(max_depth=4, limits=limits), max_depth=4)
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.batching import EngineLoad
from policies.types import (
    CostProfile,
    DraftBatch,
    EngineLimits,
    StepTiming,
    VerificationOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.planner import Planner
    from policies.types import DraftSelection

LIMITS = EngineLimits(max_tokens=512, max_reqs=32, skips_drafter=True)
CHECK_EVERY = 25


def check_planner(
    build: Callable[[EngineLimits], Planner],
    max_depth: int,
    *,
    num_steps: int = 200,
    seed: int = 0,
) -> None:
    """Drive a planner through a made-up engine and look at everything it answers.

    Checked: shapes, types and prefixes of a selection; that its budget covers what it
    admits; that it leaves the batch alone; that sampled drafts are admitted without a
    look at what comes after them; depths within bounds; batches that are empty, have no
    confidences or unusable ones; that what it exports is plain and can be imported.

    Args:
        build: Makes a new planner for an engine's limits.
        max_depth: Deepest draft it may ask for, >= 1.
        num_steps: Steps of the made-up engine.
        seed: Of its requests.

    Raises:
        AssertionError: Naming the rule that was broken.
    """
    rng = np.random.default_rng(seed)
    planner = build(LIMITS)
    planner.fit_profile(CostProfile((1, 64, 512), (9.0, 30.0, 200.0), (1.0, 2.0, 9.0)))
    for step in range(num_steps):
        num_reqs = 1 + step % 7
        batch = draw_batch(rng, num_reqs, max_depth, sampled=step % 2 == 0)
        if step % CHECK_EVERY == 0:
            _check_choices(planner, batch, rng)
        selection = _check_selection(planner, batch)
        _take_step(planner, batch, selection, max_depth, rng)
    _check_state(planner, build)


def draw_batch(
    rng: np.random.Generator, num_reqs: int, max_depth: int, *, sampled: bool
) -> DraftBatch:
    """Return drafts of `num_reqs` requests, some shorter than others."""
    lengths = rng.integers(0, max_depth + 1, num_reqs)
    return DraftBatch(
        num_draft_tokens=lengths.astype(np.int64),
        confidence=rng.uniform(0.02, 0.999, (num_reqs, max_depth)),
        req_ids=tuple(f"r{index}" for index in range(num_reqs)),
        num_decodes=num_reqs,
        num_prefill_tokens=int(rng.integers(0, 64)),
        num_context_tokens=100 * num_reqs,
        drafts_are_sampled=sampled,
    )


def _check_selection(planner: Planner, batch: DraftBatch) -> DraftSelection:
    before = copy.deepcopy(batch)
    selection = planner.select(batch)
    admitted = np.asarray(selection.num_admitted)
    assert admitted.shape == (batch.num_reqs,), (
        f"num_admitted has shape {admitted.shape} for {batch.num_reqs} requests"
    )
    assert admitted.dtype.kind in "iu", "num_admitted must count whole drafts"
    assert (admitted >= 0).all(), f"num_admitted is negative: {admitted}"
    assert (admitted <= batch.num_draft_tokens).all(), (
        f"admitted {admitted} of {batch.num_draft_tokens} drafts"
    )
    assert selection.draft_budget >= int(admitted.sum()), (
        f"draft_budget {selection.draft_budget} is below the {admitted.sum()} admitted"
    )
    np.testing.assert_array_equal(
        batch.num_draft_tokens, before.num_draft_tokens, "select changed the batch"
    )
    if batch.confidence is not None and before.confidence is not None:
        np.testing.assert_array_equal(
            batch.confidence, before.confidence, "select changed the confidences"
        )
    return selection


def _check_choices(
    planner: Planner, batch: DraftBatch, rng: np.random.Generator
) -> None:
    """Ask copies of a planner what they would do with changed batches."""
    _check_causality(planner, replace(batch, drafts_are_sampled=True), rng)
    empty = DraftBatch(np.empty(0, np.int64), np.empty((0, batch.max_depth)))
    nan = np.full((batch.num_reqs, batch.max_depth), np.nan)
    for other in (
        empty,
        replace(batch, confidence=None),
        replace(batch, confidence=nan),
        replace(batch, num_draft_tokens=np.zeros_like(batch.num_draft_tokens)),
    ):
        _check_selection(copy.deepcopy(planner), other)


def _check_causality(
    planner: Planner, batch: DraftBatch, rng: np.random.Generator
) -> None:
    """The decision at j must not move with confidences of the same request after j."""
    assert batch.confidence is not None
    admitted = copy.deepcopy(planner).select(batch).num_admitted
    for row in range(batch.num_reqs):
        for position in range(batch.max_depth):
            confidence = batch.confidence.copy()
            confidence[row, position + 1 :] = rng.uniform(
                0.0, 1.0, confidence.shape[1] - position - 1
            )
            changed = replace(batch, confidence=confidence)
            other = copy.deepcopy(planner).select(changed).num_admitted
            assert (admitted[row] > position) == (other[row] > position), (
                f"whether draft {position} of a request is verified depends on its "
                "confidences after it: sampled output would not follow the target"
            )


def _take_step(
    planner: Planner,
    batch: DraftBatch,
    selection: DraftSelection,
    max_depth: int,
    rng: np.random.Generator,
) -> None:
    num_reqs = batch.num_reqs
    planner.plan_batch(
        EngineLoad(num_reqs, num_reqs + 4, 20, np.array([8, 8]), 100, None)
    )
    for asked in (num_reqs, 0):
        depth = planner.choose_depth(asked)
        assert isinstance(depth, int), f"choose_depth returned {depth!r}"
        assert 0 <= depth <= max_depth, f"depth {depth} is not within 0..{max_depth}"
    planner.acceptance_scale(batch.req_ids)
    planner.early_exit(batch.req_ids)
    verified = np.asarray(selection.num_admitted, dtype=np.int64)
    accepted = np.minimum(verified, rng.geometric(0.4, num_reqs) - 1)
    planner.observe(VerificationOutcome(verified, accepted, batch.req_ids))
    nothing = np.zeros(num_reqs, dtype=np.int64)
    planner.observe(VerificationOutcome(nothing, nothing, batch.req_ids))
    target_ms = 9.0 + 0.3 * float(num_reqs + verified.sum())
    planner.observe_timing(
        StepTiming(
            num_reqs,
            num_reqs + int(verified.sum()),
            batch.num_prefill_tokens,
            batch.num_context_tokens,
            max_depth,
            target_ms,
            1.0,
            0.5 * (max_depth - 1),
            0.5,
        )
    )
    planner.note_skipped_steps(1)
    planner.forget(batch.req_ids[0])


def _check_state(planner: Planner, build: Callable[[EngineLimits], Planner]) -> None:
    state = planner.export_state()
    assert json.loads(json.dumps(state)) == state, "export_state must be plain values"
    fresh = build(LIMITS)
    fresh.import_state({})
    fresh.import_state(state)
    for name, value in planner.report().items():
        assert isinstance(name, str), f"report names a gauge {name!r}"
        assert isinstance(value, (int, float)), f"report: {name} is {value!r}"
