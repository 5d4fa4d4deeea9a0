"""Draft budget and depth against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.budget import choose_draft_budget, survival_threshold
from policies.decisions.depth import estimate_depths, plan_depth


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_has_the_largest_surplus_of_all(seed: int):
    rng = np.random.default_rng(seed)
    candidates = np.sort(rng.random(rng.integers(0, 30)))[::-1]
    stairs = 5.0 * -(-np.arange(candidates.size + 1) // 4)
    step_ms = 20.0 + stairs + rng.random() * np.arange(candidates.size + 1)
    price = rng.random() * 0.3
    surplus = [
        candidates[:count].sum() - price * step_ms[count]
        for count in range(candidates.size + 1)
    ]
    choice = choose_draft_budget(candidates, step_ms, price)
    assert surplus[choice.draft_budget] == pytest.approx(max(surplus))


def test_a_budget_behind_a_dear_first_stair_is_found():
    # The first token costs a whole stair, the next three are free.
    candidates = np.array([0.9, 0.8, 0.7, 0.6])
    step_ms = np.array([10.0, 20.0, 20.0, 20.0, 20.0])
    assert choose_draft_budget(candidates, step_ms, 0.2).draft_budget == 4
    assert choose_draft_budget(candidates, step_ms, 0.4).draft_budget == 0


def test_nothing_to_verify_needs_no_budget():
    choice = choose_draft_budget(np.array([]), np.array([10.0]), 1.0)
    assert choice.draft_budget == 0


def test_the_latency_target_cuts_the_budget_and_says_so():
    candidates = np.full(10, 0.9)
    step_ms = 20.0 + np.arange(11)
    free = choose_draft_budget(candidates, step_ms, 0.1)
    cut = choose_draft_budget(candidates, step_ms, 0.1, max_step_ms=24.0)
    assert (free.draft_budget, free.num_cut_by_latency) == (10, 0)
    assert (cut.draft_budget, cut.num_cut_by_latency) == (4, 6)


def test_a_target_that_cannot_be_met_verifies_nothing():
    choice = choose_draft_budget(
        np.array([0.9]), np.array([20.0, 21.0]), 0.1, max_step_ms=5.0
    )
    assert choice.draft_budget == 0
    assert choice.num_cut_by_latency > 0


def test_prices_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match=r"must price 0\.\.2 drafts"):
        choose_draft_budget(np.array([0.5, 0.4]), np.array([1.0, 2.0]), 0.1)


def test_the_threshold_is_the_price_of_an_average_token():
    assert survival_threshold(np.array([20.0, 30.0]), 10.0, 0.5) == pytest.approx(0.5)


def brute_force_goodput(
    acceptance: np.ndarray, depth: int, num_reqs: int, per_token: float, per_pass: float
) -> float:
    """Try every threshold at one depth."""
    survival = np.cumprod(acceptance, axis=1)[:, :depth].ravel()
    best = 0.0
    for threshold in [*survival, 2.0]:
        kept = survival[survival >= threshold]
        tokens = num_reqs * (1 + kept.sum() / len(acceptance))
        drafts = num_reqs * kept.size / len(acceptance)
        step_ms = 10 + per_token * (num_reqs + drafts) + per_pass * depth
        best = max(best, tokens / step_ms)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_depth_is_close_to_the_best_of_all_depths_and_thresholds(seed: int):
    rng = np.random.default_rng(seed)
    acceptance = rng.beta(3, 1.5, (40, 4))
    num_reqs = int(rng.integers(1, 40))
    per_token, per_pass = rng.uniform(0.05, 1.0), rng.uniform(0.1, 3.0)
    estimate = estimate_depths(acceptance)
    step_ms = (
        10
        + per_token * num_reqs * (1 + estimate.verified)
        + per_pass * np.arange(5)[:, None]
    )
    plan = plan_depth(estimate, step_ms, num_reqs, current=0)
    best = max(
        brute_force_goodput(acceptance, depth, num_reqs, per_token, per_pass)
        for depth in range(5)
    )
    # Thresholds are compared on a grid of 32, hence not exactly the best.
    assert plan.tokens_per_ms == pytest.approx(best, rel=0.01)
    assert plan.tokens_per_ms <= best + 1e-12


def test_a_depth_is_kept_unless_another_promises_enough_more():
    estimate = estimate_depths(np.full((8, 2), 0.5))
    step_ms = np.full(estimate.gained.shape, 10.0)
    deepest = plan_depth(estimate, step_ms, 4, current=1)
    kept = plan_depth(estimate, step_ms, 4, current=1, keep_gain=2.0)
    assert (deepest.depth, kept.depth) == (2, 1)


def test_useless_drafts_are_not_made():
    estimate = estimate_depths(np.full((8, 3), 1e-4))
    step_ms = 10 + estimate.verified + np.arange(4)[:, None]
    assert plan_depth(estimate, step_ms, 4, current=3).depth == 0


def test_the_latency_target_limits_the_depth():
    estimate = estimate_depths(np.full((8, 3), 0.95))
    step_ms = np.broadcast_to(10.0 + 5 * np.arange(4)[:, None], estimate.gained.shape)
    assert plan_depth(estimate, step_ms, 4, current=0).depth == 3
    assert plan_depth(estimate, step_ms, 4, current=0, max_step_ms=16.0).depth == 1


def test_a_latency_target_draws_the_line_between_drafts():
    acceptance = np.random.default_rng(0).uniform(0.2, 0.99, (64, 3))
    estimate = estimate_depths(acceptance)
    step_ms = 20.0 + 8.0 * estimate.verified
    free = plan_depth(estimate, step_ms, 8, current=0)
    bound = plan_depth(estimate, step_ms, 8, current=0, max_step_ms=24.0)
    assert free.min_value == 0.0
    survival = np.cumprod(acceptance[:, : bound.depth], axis=1)
    verified = (survival >= bound.min_value).sum() / 64
    assert verified == pytest.approx(bound.budget_per_req)
    assert verified <= 0.5 < free.budget_per_req
    none = plan_depth(estimate, step_ms, 8, current=0, max_step_ms=20.0)
    assert (none.depth, none.budget_per_req) == (0, 0.0)
