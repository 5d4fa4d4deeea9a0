"""What is drafted, verified and run, against brute force and formulas."""

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
from policies.decisions.budget import find_budget, survival_threshold
from policies.decisions.depth import estimate_depths, plan_depth
from policies.decisions.early_exit import EarlyExitRule
from policies.decisions.latency import latest_step_ms, reserve_drafts
from policies.decisions.recent_drafts import RecentDrafts
from policies.estimators.logit import to_log_odds, to_probability
from policies.estimators.step_cost import StepCost
from policies.types import AcceptanceScale, CostProfile


@pytest.mark.parametrize("seed", range(30))
def test_the_budget_has_the_largest_surplus_of_all_that_meet_the_target(seed: int):
    """On a staircase: the first token of a stair never pays, the next ones are free."""
    rng = np.random.default_rng(seed)
    candidates = np.sort(rng.random(seed % 30))[::-1]
    counts = np.arange(candidates.size + 1)
    step_ms = 20.0 + 5.0 * -(-counts // 4) + rng.random() * counts
    price = rng.random() * 0.3
    surplus = np.append(0.0, candidates.cumsum()) - price * step_ms

    free, num_cut = find_budget(candidates, step_ms, price, np.inf)
    assert surplus[free] == pytest.approx(surplus.max())
    assert num_cut == 0

    max_step_ms = rng.choice(step_ms)
    budget, num_cut = find_budget(candidates, step_ms, price, max_step_ms)
    best = surplus[step_ms <= max_step_ms].max()
    assert step_ms[budget] <= max_step_ms
    assert surplus[budget] == pytest.approx(best)
    assert num_cut == max(0, free - budget)
    # A target that cannot be met verifies nothing.
    assert find_budget(candidates, step_ms, price, 19.0) == (0, free)


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


def make_stop(**changes: object) -> EarlyExitRule:
    values = {
        "req_ids": ("a", "b", "c"),
        # Confidence is acceptance.
        "scale": AcceptanceScale(1.0, np.zeros(4), np.zeros(3), 8.0),
        "max_depth": 4,
        "next_acceptance": np.array([0.8]),
        "pass_price": 0.5,
        "token_price": 0.1,
    }
    return EarlyExitRule(**(values | changes))


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_is_priced_as_written_down(seed: int):
    """Against the formulas themselves, request by request and outcome by outcome.

    Only the good outcomes of the next position count, for a draft that turns out badly
    is not verified; nothing follows a stop token.
    """
    rng = np.random.default_rng(seed)
    req_ids = tuple(range(int(rng.integers(1, 6))))
    effect = rng.normal(0.0, 1.0, len(req_ids))
    intercept = rng.normal(0.0, 0.5, 4)
    weights = rng.uniform(0.5, 2.0, len(req_ids)) if seed % 3 else None
    outcomes = np.sort(rng.random(8))
    stop = make_stop(
        req_ids=req_ids,
        scale=AcceptanceScale(1.2, intercept, effect, 8.0),
        next_acceptance=outcomes,
        pass_price=float(rng.uniform(0.01, 0.5)),
        weights=weights,
    )
    watch = stop.start(req_ids)
    weighted_survival = np.ones(len(req_ids)) if weights is None else weights.copy()
    for position in range(3):
        confidence = rng.choice([0.0, 1.0, *rng.random(4)], len(req_ids)).tolist()
        ended = [0] if rng.random() < 0.2 else []
        odds = 1.2 * to_log_odds(np.array(confidence)) + intercept[position] + effect
        weighted_survival *= to_probability(odds)
        weighted_survival[ended] = 0.0
        gain = np.maximum(np.outer(weighted_survival, outcomes) - stop.token_price, 0.0)
        pays = float(gain.sum()) > stop.pass_price * outcomes.size
        assert watch.should_continue(confidence, ended) is pays
        assert watch.weighted_survival == pytest.approx(weighted_survival)


def test_a_pass_that_is_not_about_these_requests_is_refused():
    watch = make_stop().start(("a", "b", "c"))
    with pytest.raises(ValueError, match="2 confidences for 3 requests"):
        watch.should_continue([0.5, 0.5])


def test_no_pass_after_the_deepest():
    watch = make_stop(max_depth=2, pass_price=0.0, token_price=0.0).start(("a",))
    assert watch.should_continue([0.99])
    assert not watch.should_continue([0.99])


def test_weights_and_effects_go_with_their_requests_and_others_gain_nothing():
    scale = AcceptanceScale(1.0, np.zeros(4), np.array([3.0, 0.0, -3.0]), 8.0)
    stop = make_stop(scale=scale, weights=np.array([2.0, 0.5, 0.5]))
    watch = stop.start(("c", "new", "a"))
    watch.should_continue([0.5, 0.5, 0.5])
    odds = np.exp([-3.0, 0.0, 3.0])
    assert watch.weighted_survival == pytest.approx([0.5, 0.0, 2.0] * odds / (1 + odds))


MAX_DEPTH = 4


def remembering(*drafts: np.ndarray) -> RecentDrafts:
    recent = RecentDrafts(MAX_DEPTH)
    for acceptance in drafts:
        num_reqs, depth = acceptance.shape
        recent.remember(acceptance, np.full(num_reqs, depth), None)
    return recent


def test_the_first_drafts_go_on_as_is_typical():
    tokens = remembering(np.array([[0.5]])).tokens_by_depth(np.full(MAX_DEPTH, 0.8))
    assert tokens == pytest.approx([1.0, 1.5, 1.9, 2.22, 2.476])


def test_drafts_that_ended_early_are_not_believed_to_go_on_at_their_best():
    """Half are hopeless: nothing was drafted on for, and the rest is typical."""
    typical = np.full(MAX_DEPTH, 0.95)
    ended = remembering(*8 * [np.array([[0.95], [0.05]] * 6)])
    # The same drafts, every position of which is as likely to be the one or the other.
    rng = np.random.default_rng(0)
    seen = remembering(*(rng.choice([0.95, 0.05], (12, MAX_DEPTH)) for _ in range(8)))
    gained, in_full = (
        one.estimate_depths(typical).gained[:, -1] for one in (ended, seen)
    )
    assert gained == pytest.approx(in_full, rel=0.25)
    assert gained[MAX_DEPTH] < 1.2


def test_malformed_drafts_are_lost_and_the_next_ones_are_remembered():
    recent = RecentDrafts(MAX_DEPTH)
    recent.remember([[0.9], [0.9, 0.8]], np.array([1, 2]), None)
    with pytest.raises(ValueError, match="inhomogeneous"):
        recent.sample_acceptance()

    recent.remember(np.full((1, MAX_DEPTH), 0.9), np.array([MAX_DEPTH]), None)

    assert recent.sample_acceptance() == pytest.approx([0.9] * MAX_DEPTH)


def test_requests_without_drafts_leave_the_worth_of_the_others_as_it_is():
    alike, apart = RecentDrafts(MAX_DEPTH), RecentDrafts(MAX_DEPTH)
    drafts, lengths = np.full((2, MAX_DEPTH), 0.6), np.array([MAX_DEPTH, 0])
    alike.remember(drafts, lengths, None)
    apart.remember(drafts, lengths, np.array([1.8, 0.2]))
    check_same(alike, apart)


def test_drafts_that_are_filed_late_leave_what_filing_each_at_once_leaves():
    """And the same drafts are always continued alike."""
    rng = np.random.default_rng(8)
    late, at_once = RecentDrafts(MAX_DEPTH), RecentDrafts(MAX_DEPTH)
    for _ in range(7):
        acceptance, lengths = rng.random((40, MAX_DEPTH)), rng.integers(0, 3, 40)
        for recent in (late, at_once):
            recent.remember(acceptance, lengths, None)
        at_once.sample_acceptance()
    check_same(late, at_once)


def check_same(one: RecentDrafts, other: RecentDrafts) -> None:
    typical = np.full(MAX_DEPTH, 0.5)
    seen, expected = (recent.estimate_depths(typical) for recent in (one, other))
    assert seen.gained == pytest.approx(expected.gained)
    assert seen.thresholds == pytest.approx(expected.thresholds)


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
