"""The dynamic batcher's limits, on an engine of 10 ms a step and 1 ms a token."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.batching import (
    MIN_PREFILL_TOKENS,
    EngineLoad,
    choose_max_running,
    choose_prefill_tokens,
    reserve_blocks,
)
from policies.estimators.step_cost import StepCost
from policies.types import CostProfile


@pytest.fixture
def cost() -> StepCost:
    cost = StepCost(max_tokens=1024, max_reqs=64)
    counts = (1, 64, 1024)
    cost.fit_profile(CostProfile(counts, tuple(10.0 + n for n in counts)))
    cost.host.fit_profile((1, 64), (1.0, 1.0))
    return cost


def make_load(num_running: int, latency_target_ms: float | None = None) -> EngineLoad:
    return EngineLoad(
        num_running=num_running,
        num_decode_tokens=num_running,
        num_context_tokens=100 * num_running,
        tokens_to_grow=np.full(num_running, 100),
        block_size=16,
        latency_target_ms=latency_target_ms,
    )


@pytest.mark.parametrize(
    ("target_ms", "runs_drafter", "most"),
    [
        # Goodput grows with the batch.
        (None, False, 64),
        # 10 + n + 1 ms of host <= 41 ms, or 5 ms of the drafter more.
        (41.0, False, 30),
        (41.0, True, 25),
        # One runs even where no batch meets the target.
        (1.0, False, 1),
    ],
)
def test_the_target_bounds_the_batch(
    cost: StepCost, target_ms: float | None, runs_drafter: bool, most: int
):
    cost.draft_first.fit_profile((1, 1024), (5.0, 5.0))
    assert (
        choose_max_running(cost, 0.0, 64, target_ms, runs_drafter=runs_drafter) == most
    )


def test_a_batch_that_loses_goodput_is_not_grown(cost: StepCost):
    # Past 32 the step gets so dear that more requests emit fewer tokens per second.
    cost.target.fit_profile((1, 32, 64), (10.0, 40.0, 400.0))
    assert 28 <= choose_max_running(cost, 0.0, 64, None) <= 36


@pytest.mark.parametrize(
    ("load", "target_ms"),
    [
        (make_load(0), 40.0),
        (make_load(8), None),
        # A request's own target that is missed even without prompts holds none back.
        (make_load(8, latency_target_ms=5.0), None),
    ],
)
def test_prompts_fill_the_step_where_no_target_gains_by_waiting(
    cost: StepCost, load: EngineLoad, target_ms: float | None
):
    assert choose_prefill_tokens(cost, load, 1024, target_ms) == 1024


def test_prompts_take_what_the_target_leaves(cost: StepCost):
    few = choose_prefill_tokens(cost, make_load(8), 1024, 60.0)
    many = choose_prefill_tokens(cost, make_load(8), 1024, 120.0)
    assert MIN_PREFILL_TOKENS <= few < many < 1024
    # A running request's own target counts as everybody's does.
    bound = make_load(8, latency_target_ms=60.0)
    assert choose_prefill_tokens(cost, bound, 1024, 120.0) == few
    # One that is missed anyway does not starve prompts.
    starved = choose_prefill_tokens(cost, make_load(40), 1024, 5.0)
    assert starved == MIN_PREFILL_TOKENS


def test_the_drafter_takes_its_part_of_the_target_from_the_prompts(cost: StepCost):
    cost.draft_first.fit_profile((1, 1024), (5.0, 28.0))
    cost.draft_next.fit_profile((1, 64), (4.0, 4.0))
    plain, warm, deep = (
        choose_prefill_tokens(cost, make_load(8), 1024, 80.0, num_passes=num_passes)
        for num_passes in (0, 1, 4)
    )
    assert deep < warm < plain


def test_blocks_are_held_back_for_growth_and_none_when_idle():
    assert reserve_blocks(make_load(0)) == 0
    # Half of 8 x 100 tokens, in blocks of 16.
    assert reserve_blocks(make_load(8)) == 25
