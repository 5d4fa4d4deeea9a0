"""Draft budget, depth and what latency-bound requests claim, against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.budget import choose_draft_budget, survival_threshold
from policies.decisions.depth import estimate_depths, plan_depth
from policies.decisions.latency import latest_step_ms, reserve_drafts


@pytest.mark.parametrize("seed", range(30))
def test_the_budget_has_the_largest_surplus_of_all_that_meet_the_target(seed: int):
    """On a staircase: the first token of a stair never pays, the next ones are free."""
    rng = np.random.default_rng(seed)
    candidates = np.sort(rng.random(seed % 30))[::-1]
    counts = np.arange(candidates.size + 1)
    step_ms = 20.0 + 5.0 * -(-counts // 4) + rng.random() * counts
    price = rng.random() * 0.3
    surplus = np.append(0.0, candidates.cumsum()) - price * step_ms

    free = choose_draft_budget(candidates, step_ms, price)
    assert surplus[free.draft_budget] == pytest.approx(surplus.max())
    assert free.num_cut_by_latency == 0

    max_step_ms = rng.choice(step_ms)
    cut = choose_draft_budget(candidates, step_ms, price, max_step_ms=max_step_ms)
    best = surplus[step_ms <= max_step_ms].max()
    assert step_ms[cut.draft_budget] <= max_step_ms
    assert surplus[cut.draft_budget] == pytest.approx(best)
    assert cut.num_cut_by_latency == max(0, free.draft_budget - cut.draft_budget)
    # A target that cannot be met verifies nothing.
    none = choose_draft_budget(candidates, step_ms, price, max_step_ms=19.0)
    assert (none.draft_budget, none.num_cut_by_latency) == (0, free.draft_budget)


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
    # The last ones are of no use at any depth.
    acceptance = rng.beta(3, 1.5, (40, 4)) if seed < 10 else np.full((40, 4), 1e-4)
    num_reqs = int(rng.integers(1, 40))
    per_token, per_pass = rng.uniform(0.05, 1.0), rng.uniform(0.1, 3.0)
    estimate = estimate_depths(acceptance)
    token_ms = per_token * num_reqs * (1 + estimate.verified)
    step_ms = 10 + token_ms + per_pass * np.arange(5)[:, None]
    plan = plan_depth(estimate, step_ms, num_reqs, current=0)
    best = max(
        brute_force_goodput(acceptance, depth, num_reqs, per_token, per_pass)
        for depth in range(5)
    )
    # Thresholds are compared on a grid of 32, hence not exactly the best.
    assert plan.tokens_per_ms == pytest.approx(best, rel=0.01)
    assert plan.tokens_per_ms <= best + 1e-12
    assert seed < 10 or plan.depth == 0


def test_a_depth_is_kept_unless_another_promises_enough_more():
    estimate = estimate_depths(np.full((8, 2), 0.5))
    step_ms = np.full(estimate.gained.shape, 10.0)
    deepest = plan_depth(estimate, step_ms, 4, current=1)
    kept = plan_depth(estimate, step_ms, 4, current=1, keep_gain=2.0)
    assert (deepest.depth, kept.depth) == (2, 1)


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


@pytest.mark.parametrize(
    ("target_ms", "ms_per_draft", "reserved"),
    [
        # 40 ms a step: 1, 1.9, 2.7, 3.4, 4 tokens take 40, 21.1, 14.8, 11.8, 10 each.
        *((target, 1.0, 0) for target in (np.inf, 41.0, 40.0)),
        *((25.0, 1.0, 1), (15.0, 1.0, 2), (12.0, 1.0, 3), (1.0, 1.0, 4)),
        # The second draft brings .8 for 1.9 tokens' 40 ms: worth it below 16.8 ms.
        *((1.0, 16.0, 2), (1.0, 17.0, 1)),
    ],
)
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_a_request_claims_as_many_drafts_as_its_target_needs(
    target_ms: float, ms_per_draft: float, reserved: int, num_drafts: int
):
    claimed = reserve_drafts(
        np.array([[0.9, 0.8, 0.7, 0.6]]),
        np.array([num_drafts]),
        np.array([target_ms]),
        40.0,
        ms_per_draft,
    )
    assert claimed.tolist() == [min(reserved, num_drafts)]


def test_a_claim_depends_on_nothing_behind_it():
    rng = np.random.default_rng(0)
    for _ in range(200):
        survival = np.cumprod(rng.random((5, 4)), axis=1)
        target_ms, cost_ms = rng.uniform(5, 40, 5), rng.uniform(0, 10)
        before = reserve_drafts(survival, np.full(5, 4), target_ms, 40.0, cost_ms)
        position = rng.integers(1, 4)
        survival[:, position:] *= rng.random((5, 1))
        after = reserve_drafts(survival, np.full(5, 4), target_ms, 40.0, cost_ms)
        np.testing.assert_array_equal(
            np.minimum(before, position), np.minimum(after, position)
        )


def test_the_tightest_target_within_reach_limits_the_step():
    tokens, targets_ms = np.array([2.0, 1.0, 1.0]), np.array([20.0, 45.0, np.inf])
    for fastest_ms, latest_ms in ((30.0, 40.0), (42.0, 45.0), (50.0, np.inf)):
        assert latest_step_ms(tokens, targets_ms, fastest_ms) == latest_ms
