"""What is drafted, verified and run, against brute force and formulas."""

import numpy as np
import pytest

from policies.decisions.batching import (
    MIN_PREFILL_TOKENS,
    EngineLoad,
    choose_max_running,
    choose_prefill_tokens,
)
from policies.decisions.budget import find_budget
from policies.decisions.depth import estimate_depths, plan_depth
from policies.decisions.early_exit import EarlyExitRule
from policies.decisions.latency import (
    find_within_reach,
    latest_step_ms,
    reserve_drafts,
)
from policies.decisions.recent_drafts import RecentDrafts
from policies.estimators.logit import to_log_odds, to_probability
from policies.estimators.step_cost import StepCost
from policies.types import AcceptanceScale, CostProfile


@pytest.mark.parametrize("seed", range(30))
def test_the_budget_has_the_largest_surplus_of_all_that_meet_the_target(seed):
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


def brute_force_goodput(acceptance, depth, num_reqs, per_token, per_pass):
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
def test_the_depth_is_close_to_the_best_of_all_depths_and_thresholds(seed):
    rng = np.random.default_rng(seed)
    # The last ones are of no use at any depth.
    acceptance = rng.beta(3, 1.5, (40, 4)) if seed < 10 else np.full((40, 4), 1e-4)
    num_reqs = int(rng.integers(1, 40))
    per_token, per_pass = rng.uniform(0.05, 1.0), rng.uniform(0.1, 3.0)
    estimate = estimate_depths(acceptance)
    token_ms = per_token * num_reqs * (1 + estimate.verified)
    step_ms = 10 + token_ms + per_pass * np.arange(5)[:, None]
    plan = plan_depth(estimate, step_ms, num_reqs, current=0)
    prices = num_reqs, per_token, per_pass
    best = max(brute_force_goodput(acceptance, depth, *prices) for depth in range(5))
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
    target_ms, ms_per_draft, reserved, num_drafts
):
    survival, counts = np.array([[0.9, 0.8, 0.7, 0.6]]), np.array([num_drafts])
    prices = np.array([target_ms]), 40.0, ms_per_draft
    claimed = reserve_drafts(survival, counts, *prices)
    assert claimed.tolist() == [min(reserved, num_drafts)]


@pytest.mark.parametrize(
    ("targets_ms", "within"),
    [
        # 20 ms, and 4 for a draft, with which a token takes half.
        ([12.0, 25.0, np.inf], [True] * 3),
        ([11.9, 25.0, np.inf], [False, True, True]),
        # Two share a step of 28 ms, until the tighter target is given up.
        ([12.0, 15.0], [False, True]),
        ([14.0, 14.0], [True, True]),
    ],
)
def test_a_target_is_within_reach_of_the_drafts_of_those_who_need_them(
    targets_ms, within
):
    # A second draft, at another .1 token, is no use to anybody.
    for tokens in ([1.0, 2.0], [1.0, 2.0, 2.1]):
        found = find_within_reach(np.array(targets_ms), np.array(tokens), 20.0, 4.0)
        assert found.tolist() == within


def test_the_tightest_target_within_reach_limits_the_step():
    tokens, targets_ms = np.array([2.0, 1.0, 1.0]), np.array([20.0, 45.0, np.inf])
    for fastest_ms, latest_ms in ((30.0, 40.0), (42.0, 45.0), (50.0, np.inf)):
        assert latest_step_ms(tokens, targets_ms, fastest_ms) == latest_ms


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_is_priced_as_written_down(seed):
    """Against the formulas themselves, request by request and outcome by outcome.

    Only the good outcomes of the next position count, for a draft that turns out badly
    is not verified; nothing follows a stop token, and whom the rule is not about gains
    nothing.
    """
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, 6))
    effect, outcomes = rng.normal(0.0, 1.0, num_reqs), np.sort(rng.random(8))
    intercept = rng.normal(0.0, 0.5, 4)
    weights = rng.uniform(0.5, 2.0, num_reqs) if seed % 3 else None
    stop = EarlyExitRule(
        tuple(range(num_reqs)),
        AcceptanceScale(1.2, intercept, effect, 8.0),
        max_depth=4,
        next_acceptance=outcomes,
        pass_price=float(rng.uniform(0.01, 0.5)),
        token_price=0.1,
        weights=weights,
    )
    rows = rng.permutation(num_reqs)
    watch = stop.start((*rows.tolist(), "new"))
    own = np.append(np.ones(num_reqs) if weights is None else weights[rows], 0.0)
    effect = np.append(effect[rows], 0.0)
    for position in range(3):
        confidence = rng.choice([0.0, 1.0, *rng.random(4)], own.size).tolist()
        ended = [0] if rng.random() < 0.2 else []
        odds = 1.2 * to_log_odds(np.array(confidence)) + intercept[position] + effect
        own *= to_probability(odds)
        own[ended] = 0.0
        gain = np.maximum(np.outer(own, outcomes) - stop.token_price, 0.0)
        pays = float(gain.sum()) > stop.pass_price * outcomes.size
        assert watch.should_continue(confidence, ended) is pays
        assert watch.weighted_survival == pytest.approx(own)
    # None is deeper than the last.
    assert not watch.should_continue([0.99] * own.size)
    with pytest.raises(ValueError, match=f"0 confidences for {own.size} requests"):
        watch.should_continue([])


MAX_DEPTH = 4


def remembering(*drafts):
    recent = RecentDrafts(MAX_DEPTH)
    for acceptance in drafts:
        num_reqs, depth = acceptance.shape
        recent.remember(acceptance, np.full(num_reqs, depth), None)
    return recent


def test_drafts_that_ended_early_are_not_believed_to_go_on_at_their_best():
    """Half are hopeless: nothing was drafted on for, and the rest is typical."""
    typical = np.full(MAX_DEPTH, 0.95)
    ended = remembering(*8 * [np.array([[0.95], [0.05]] * 6)])
    # The same drafts, every position of which is as likely to be the one or the other.
    rng = np.random.default_rng(0)
    seen = remembering(*(rng.choice([0.95, 0.05], (12, MAX_DEPTH)) for _ in range(8)))
    estimates = [one.estimate_depths(typical) for one in (ended, seen)]
    gained, in_full = (one.gained[:, -1] for one in estimates)
    assert gained == pytest.approx(in_full, rel=0.25)
    assert gained[MAX_DEPTH] < 1.2


def test_malformed_drafts_are_lost_and_the_next_ones_are_remembered():
    recent = RecentDrafts(MAX_DEPTH)
    recent.remember([[0.9], [0.9, 0.8]], np.array([1, 2]), None)
    with pytest.raises(ValueError, match="inhomogeneous"):
        recent.sample_acceptance()

    recent.remember(np.full((1, MAX_DEPTH), 0.9), np.array([MAX_DEPTH]), None)

    assert recent.sample_acceptance() == pytest.approx([0.9] * MAX_DEPTH)


@pytest.fixture
def cost():
    cost = StepCost(max_tokens=1024, max_reqs=64)
    counts = (1, 64, 1024)
    cost.fit_profile(CostProfile(counts, tuple(10.0 + n for n in counts)))
    cost.host.fit_profile((1, 64), (1.0, 1.0))
    return cost


def make_load(num_running, latency_target_ms=None):
    num_context_tokens, to_grow = 100 * num_running, np.full(num_running, 100)
    counts = num_running, num_running, num_context_tokens, to_grow
    return EngineLoad(*counts, block_size=16, latency_target_ms=latency_target_ms)


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
def test_target_and_goodput_bound_the_batch(cost, target_ms, runs_drafter, most):
    cost.draft_first.fit_profile((1, 1024), (5.0, 5.0))
    found = choose_max_running(cost, 0.0, 64, target_ms, runs_drafter=runs_drafter)
    assert found == most
    # Past 32 the step gets so dear that more requests emit fewer tokens per second.
    cost.target.fit_profile((1, 32, 64), (10.0, 40.0, 400.0))
    assert choose_max_running(cost, 0.0, 64, None) == pytest.approx(32, abs=4)


def test_prompts_take_what_the_target_leaves(cost):
    few = choose_prefill_tokens(cost, make_load(8), 1024, 60.0)
    many = choose_prefill_tokens(cost, make_load(8), 1024, 120.0)
    assert MIN_PREFILL_TOKENS <= few < many < 1024
    # A running request's own target counts as everybody's does, for each token.
    for tokens in (1.0, 2.0):
        bound, brought = make_load(8, 60.0 / tokens), {"tokens_in_full": tokens}
        assert choose_prefill_tokens(cost, bound, 1024, 120.0, **brought) == few
    # One that is missed anyway does not starve prompts.
    starved = choose_prefill_tokens(cost, make_load(40), 1024, 5.0)
    assert starved == MIN_PREFILL_TOKENS
    # They fill the step where no target gains by their waiting: nothing runs, there is
    # none, or a request's own is missed even without prompts.
    late = make_load(8, latency_target_ms=5.0)
    for load, target_ms in ((make_load(0), 40.0), (make_load(8), None), (late, None)):
        assert choose_prefill_tokens(cost, load, 1024, target_ms) == 1024


def test_the_drafter_takes_its_part_of_the_target_from_the_prompts(cost):
    cost.draft_first.fit_profile((1, 1024), (5.0, 28.0))
    cost.draft_next.fit_profile((1, 64), (4.0, 4.0))
    plain, warm, deep = (
        choose_prefill_tokens(cost, make_load(8), 1024, 80.0, num_passes=num_passes)
        for num_passes in (0, 1, 4)
    )
    assert deep < warm < plain
