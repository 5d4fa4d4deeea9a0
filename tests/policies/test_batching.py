"""The dynamic batcher's limits."""

from __future__ import annotations

import numpy as np

from policies.decisions.batching import (
    MIN_PREFILL_TOKENS,
    EngineLoad,
    choose_max_running,
    choose_prefill_tokens,
    reserve_blocks,
)
from policies.estimators.step_cost import StepCost
from policies.types import CostProfile


def make_cost() -> StepCost:
    """An engine of 10 ms a step and 1 ms a token."""
    cost = StepCost(max_tokens=1024, max_reqs=64)
    counts = (1, 64, 1024)
    cost.fit_profile(CostProfile(counts, tuple(10.0 + n for n in counts)))
    cost.host.fit_profile((1, 64), (1.0, 1.0))
    return cost


def make_load(
    num_running: int, growth: int = 100, latency_target_ms: float | None = None
) -> EngineLoad:
    return EngineLoad(
        num_running=num_running,
        num_decode_tokens=num_running,
        num_context_tokens=100 * num_running,
        tokens_to_grow=np.full(num_running, growth),
        block_size=16,
        latency_target_ms=latency_target_ms,
    )


def test_without_a_target_everybody_runs_because_goodput_grows_with_the_batch():
    assert choose_max_running(make_cost(), 100.0, 64, None) == 64


def test_the_target_bounds_the_batch():
    # 10 + n + 1 ms of host <= 41 ms.
    assert choose_max_running(make_cost(), 0.0, 64, 41.0) == 30


def test_a_drafter_that_always_runs_counts_for_the_target():
    cost = make_cost()
    cost.draft_first.fit_profile((1, 1024), (5.0, 5.0))
    # 10 + n + 1 ms of host + 5 of the drafter <= 41 ms.
    assert choose_max_running(cost, 0.0, 64, 41.0, runs_drafter=True) == 25


def test_one_request_runs_even_where_no_batch_meets_the_target():
    assert choose_max_running(make_cost(), 0.0, 64, 1.0) == 1


def test_a_batch_that_loses_goodput_is_not_grown():
    # Past 32 the step gets so dear that more requests emit fewer tokens per second.
    cost = make_cost()
    cost.target.fit_profile((1, 32, 64), (10.0, 40.0, 400.0))
    assert 28 <= choose_max_running(cost, 0.0, 64, None) <= 36


def test_prompts_fill_the_step_when_nothing_decodes_or_no_target_is_set():
    cost = make_cost()
    assert choose_prefill_tokens(cost, make_load(0), 1024, 40.0) == 1024
    assert choose_prefill_tokens(cost, make_load(8), 1024, None) == 1024


def test_prompts_take_what_the_target_leaves():
    few = choose_prefill_tokens(make_cost(), make_load(8), 1024, 60.0)
    many = choose_prefill_tokens(make_cost(), make_load(8), 1024, 120.0)
    assert MIN_PREFILL_TOKENS <= few < many < 1024


def test_the_drafter_takes_its_part_of_the_target_from_the_prompts():
    cost = make_cost()
    cost.draft_first.fit_profile((1, 1024), (5.0, 28.0))
    cost.draft_next.fit_profile((1, 64), (4.0, 4.0))
    plain = choose_prefill_tokens(cost, make_load(8), 1024, 80.0)
    warm = choose_prefill_tokens(cost, make_load(8), 1024, 80.0, num_passes=1)
    deep = choose_prefill_tokens(cost, make_load(8), 1024, 80.0, num_passes=4)
    assert deep < warm < plain


def test_a_running_requests_own_target_leaves_prompts_less_room():
    few = choose_prefill_tokens(
        make_cost(), make_load(8, latency_target_ms=60.0), 1024, 120.0
    )
    assert few == choose_prefill_tokens(make_cost(), make_load(8), 1024, 60.0)
    # One that is missed even without prompts is no reason to hold them back.
    out_of_reach = make_load(8, latency_target_ms=5.0)
    assert choose_prefill_tokens(make_cost(), out_of_reach, 1024, None) == 1024


def test_a_target_that_is_missed_anyway_does_not_starve_prompts():
    tokens = choose_prefill_tokens(make_cost(), make_load(40), 1024, 5.0)
    assert tokens == MIN_PREFILL_TOKENS


def test_blocks_are_held_back_for_growth_and_none_when_idle():
    assert reserve_blocks(make_load(0)) == 0
    # Half of 8 x 100 tokens, in blocks of 16.
    assert reserve_blocks(make_load(8)) == 25
