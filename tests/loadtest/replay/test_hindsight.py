"""What hindsight knows: one calibration of all outcomes, and what steps cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadtest.arms import parse_arm
from loadtest.replay.hindsight import fit_calibration, play_hindsight
from loadtest.replay.offline_fit import fit_offline
from loadtest.replay.prices import ContextPrice, StepPrices, fit_prices
from loadtest.replay.replay import (
    ReplayStep,
    play_clairvoyant,
    play_fixed,
    play_own,
    play_planner,
    read_steps,
)
from policies.baselines import FixedPlanner
from policies.estimators.logit import to_log_odds, to_probability
from policies.types import StepTiming
from tests.loadtest.replay.test_bounds import NUM_REQS, PRICES, make_trace

DEPTH = 3
INTERCEPT, SLOPE = np.array([0.3, -0.2, -0.5]), 0.7


def draw_steps(
    num_steps: int,
    effects: Sequence[float],
    *,
    seed: int = 0,
    shift: float = 0.0,
) -> list[ReplayStep]:
    """Draw steps of requests with known effects; the last half is easier by `shift`."""
    rng = np.random.default_rng(seed)
    num_reqs = len(effects)
    steps = []
    for number in range(num_steps):
        confidence = rng.uniform(0.1, 0.99, (num_reqs, DEPTH))
        log_odds = INTERCEPT + SLOPE * to_log_odds(confidence)
        log_odds += np.asarray(effects)[:, None] + shift * (number >= num_steps / 2)
        passed = rng.random((num_reqs, DEPTH)) < to_probability(log_odds)
        steps.append(
            ReplayStep(
                num_reqs=num_reqs,
                num_context_tokens=100,
                req_ids=tuple(range(num_reqs)),
                confidence=confidence,
                num_offered=np.full(num_reqs, DEPTH),
                num_accepted=np.cumprod(passed, axis=1).sum(axis=1),
            )
        )
    return steps


# Calibration


def test_the_fit_finds_the_law_that_outcomes_were_drawn_by() -> None:
    effects = (1.0, -1.0, 0.5, -0.5)
    fit = fit_offline(draw_steps(3000, effects), DEPTH)

    np.testing.assert_allclose(fit.intercept, INTERCEPT, atol=0.15)
    assert fit.slope == pytest.approx(SLOPE, abs=0.05)
    found = [fit.effects[req_id] for req_id in range(4)]
    np.testing.assert_allclose(found, effects, atol=0.15)


def test_nothing_is_forgotten() -> None:
    """Halves that differ count the same, however long ago the first one was."""
    steps = draw_steps(2000, (0.0, 0.0), shift=2.0)
    calibration = fit_calibration(steps, DEPTH)
    back = fit_calibration(steps[::-1], DEPTH)

    predicted, happened = [], []
    for step in steps:
        first = calibration.predict(step.confidence, step.req_ids)[:, 0]
        predicted.append(first.mean())
        happened.append((step.num_accepted > 0).mean())
    # Its predictions are right on the whole, and too high in the first half.
    assert np.mean(predicted) == pytest.approx(np.mean(happened), abs=0.005)
    assert np.mean(predicted[:1000]) > np.mean(happened[:1000]) + 0.05
    confidence = np.full((1, DEPTH), 0.7)
    np.testing.assert_allclose(
        calibration.predict(confidence, (0,)), back.predict(confidence, (0,)), rtol=1e-4
    )


def test_effects_of_requests_are_shrunk_as_online() -> None:
    # A single outcome: (1 - p) / (p (1 - p) + 1.5) for the first Newton step.
    steps = draw_steps(300, (0.0, 0.0, 0.0))
    lone = ReplayStep(
        num_reqs=1,
        num_context_tokens=0,
        req_ids=(9,),
        confidence=np.full((1, DEPTH), 0.5),
        num_offered=np.array([1]),
        num_accepted=np.array([1]),
    )
    fit = fit_offline([*steps, lone], DEPTH)
    p = float(to_probability(fit.intercept[:1])[0])
    assert fit.effects[9] == pytest.approx((1 - p) / (p * (1 - p) + 1.5), rel=0.1)


def test_a_depth_that_was_never_tried_has_the_level_of_the_others() -> None:
    fit = fit_offline(draw_steps(1000, (0.0,)), DEPTH + 2)
    assert fit.intercept[DEPTH:] == pytest.approx(fit.intercept[:DEPTH].mean(), abs=0.3)


def test_a_trace_in_which_everything_was_accepted_is_no_certainty() -> None:
    steps = draw_steps(50, (0.0,))
    for step in steps:
        step.num_accepted[:] = DEPTH
    fit = fit_offline(steps, DEPTH)
    assert np.isfinite(fit.intercept).all()
    assert (to_probability(fit.intercept) < 0.9999).all()
    assert fit_offline([], DEPTH).effects == {}


def test_the_fitted_calibration_stays_as_it_is() -> None:
    steps = draw_steps(400, (1.0, -1.0))
    calibration = fit_calibration(steps, DEPTH)
    confidence = np.full((2, DEPTH), 0.7)
    before = calibration.predict(confidence, (0, 1))

    calibration.observe(confidence, (0, 1), np.full(2, DEPTH), np.zeros(2, np.int64))
    calibration.age()
    calibration.forget(0)

    np.testing.assert_array_equal(calibration.predict(confidence, (0, 1)), before)
    assert calibration.scale((0, 1)).effect[0] > calibration.scale((0, 1)).effect[1]


# Costs


class Listening(FixedPlanner):
    """Skips the drafter, and keeps what it is told of steps."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        super().__init__(1)
        object.__setattr__(self, "told", [])

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        return 0 if len(self.told) < 2 else 1

    def observe_timing(self, timing: StepTiming) -> None:
        self.told.append(timing)


def test_a_planner_is_told_what_it_is_charged_for_catching_up() -> None:
    steps = read_steps(make_trace(1, num_steps=4), 1)
    planner = Listening()
    played = play_planner(steps, planner, PRICES)

    depths = [timing.depth for timing in planner.told]
    assert depths == [0, 0, 1, 1]
    backlog = [timing.num_backlog for timing in planner.told]
    assert backlog == [0, 0, 2 * NUM_REQS, 0]
    told_ms = [timing.total_ms + timing.backlog_ms for timing in planner.told]
    np.testing.assert_allclose(played.ms, told_ms)


def test_the_price_of_context_is_found_where_a_trace_tells_it() -> None:
    arm = parse_arm("fixed:2")
    rng = np.random.default_rng(0)
    trace = make_trace(2, num_steps=400)
    context = rng.integers(500, 1500, 400)
    trace.arrays["step_num_context_tokens"] = context
    noise_ms = rng.normal(0.0, 0.5, 400)
    trace.arrays["step_target_ms"] = trace.arrays["step_target_ms"] + noise_ms
    unrelated = fit_prices({arm: trace})
    trace.arrays["step_target_ms"] = trace.arrays["step_target_ms"] + 0.003 * context
    # Bursts, as of a neighbour, must not be taken for it.
    trace.arrays["step_target_ms"][::40] += 500.0
    prices = fit_prices({arm: trace})

    assert unrelated is not None
    assert unrelated.shared.context.per_token_ms < 3e-4
    assert prices is not None
    price = prices.shared.context
    assert price.per_token_ms == pytest.approx(0.003, rel=0.15)
    assert price.at(price.usual + 1000.0) == pytest.approx(3.0, rel=0.15)
    assert price.at(np.nan) == 0.0


def test_everybody_pays_for_the_context_of_a_step() -> None:
    trace = make_trace(2, num_steps=10)
    steps = read_steps(trace, 2)
    dear = StepPrices(
        PRICES.target,
        PRICES.draft_first,
        PRICES.draft_next_ms,
        PRICES.host_ms,
        ContextPrice(0.05, usual=60.0),
    )
    for play in (
        lambda prices: play_fixed(steps, prices, 2),
        lambda prices: play_planner(steps, FixedPlanner(2), prices),
        lambda prices: play_own(trace, prices),
    ):
        slow, fast = play(dear), play(PRICES)
        assert slow is not None
        assert fast is not None
        # 40 positions more than usual.
        np.testing.assert_allclose(slow.ms - fast.ms, 2.0)
    foreseen = [play_clairvoyant(steps, prices, 2) for prices in (dear, PRICES)]
    assert foreseen[0].tokens_per_s() < foreseen[1].tokens_per_s()


def test_hindsight_reckons_with_the_context_as_with_any_fixed_cost() -> None:
    steps = read_steps(make_trace(3, num_steps=60), 3)
    parts = PRICES.target, PRICES.draft_first, PRICES.draft_next_ms
    by_context = StepPrices(*parts, PRICES.host_ms, ContextPrice(1.0, usual=60.0))
    by_host = StepPrices(*parts, PRICES.host_ms + 40.0)

    known, other = (play_hindsight(steps, one, 3) for one in (by_context, by_host))

    np.testing.assert_array_equal(known.tokens, other.tokens)
    np.testing.assert_allclose(known.ms, other.ms)
    # Without that cost, drafts would have to promise more.
    cheap = play_hindsight(steps, PRICES, 3)
    assert cheap.tokens.sum() < known.tokens.sum()
