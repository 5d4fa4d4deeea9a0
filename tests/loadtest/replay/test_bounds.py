"""Prices, replay and bounds: arithmetic on made-up traces whose truth is known."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.arms import Arm, parse_arm
from loadtest.engine.plan import Cell
from loadtest.engine.store import Store
from loadtest.replay.bounds import MIN_HEADROOM, find_bounds, main
from loadtest.replay.hindsight import play_hindsight, play_online
from loadtest.replay.prices import PriceCurve, StepPrices, fit_curve, fit_prices
from loadtest.replay.replay import (
    play_clairvoyant,
    play_fixed,
    play_own,
    play_planner,
    read_steps,
)
from loadtest.replay.traces import RecordedTrace
from policies.baselines import FixedPlanner
from policies.decisions.early_exit import EarlyExitRule
from policies.exploration import PROBE_EVERY

MAX_DEPTH = 5
NUM_REQS = 6
HOST_MS, PASS_MS = 1.0, 3.0
GOODPUT = parse_arm(f"goodput:{MAX_DEPTH}")
FIXED = tuple(parse_arm(f"fixed:{depth}") for depth in range(1, MAX_DEPTH + 1))


def target_ms(num_tokens: float) -> float:
    return 20.0 + num_tokens


def first_ms(num_tokens: float) -> float:
    return 2.0 + 0.1 * num_tokens


def true_ms(num_tokens: float, depth: int) -> float:
    """A step of the made-up engine: 20 + n, a drafter of 2 + .1 n and 3 a pass."""
    plain = target_ms(num_tokens) + HOST_MS
    return plain + (first_ms(num_tokens) + PASS_MS * (depth - 1) if depth else 0.0)


PRICES = StepPrices(
    PriceCurve(np.array([1.0, 100.0]), np.array([target_ms(1), target_ms(100)])),
    PriceCurve(np.array([1.0, 100.0]), np.array([first_ms(1), first_ms(100)])),
    PASS_MS,
    HOST_MS,
)


def make_trace(
    depth: int,
    num_steps: int = 150,
    *,
    host_ms: float = HOST_MS,
    pass_ms: float = PASS_MS,
    reqs_per_step: int = NUM_REQS,
    first_backlog_ms: float = 0.0,
) -> RecordedTrace:
    """Record an arm that drafts and verifies `depth` tokens for every request."""
    rng = np.random.default_rng(depth)
    num_drafts = num_steps * reqs_per_step
    # Requests are easy or hard throughout; the drafter knows it, too confidently.
    confidence = rng.choice([0.98, 0.45], (num_steps, reqs_per_step, 1))
    confidence = np.clip(
        confidence + rng.uniform(-0.02, 0.02, (num_steps, reqs_per_step, depth)), 0, 1
    ).reshape(num_drafts, depth)
    passed = rng.random(confidence.shape) < confidence**2
    accepted = np.cumprod(passed, axis=1).sum(axis=1)
    num_tokens = reqs_per_step * (1 + depth)
    every = np.ones(num_steps)
    steps = {
        "num_reqs": reqs_per_step * every,
        "num_decode_tokens": num_tokens * every,
        "num_prefill_tokens": 0 * every,
        "num_context_tokens": 100 * every,
        "target_ms": target_ms(num_tokens) * every,
        "draft_first_ms": first_ms(num_tokens) * every,
        "draft_next_ms": pass_ms * (depth - 1) * every,
        "host_ms": host_ms * every,
        "backlog_ms": first_backlog_ms * (np.arange(num_steps) == 0),
        "depth": depth * every,
    }
    drafts = {
        "step": np.repeat(np.arange(num_steps), reqs_per_step),
        "req": np.tile(np.arange(reqs_per_step), num_steps),
        "num_offered": np.full(num_drafts, depth),
        "num_admitted": np.full(num_drafts, depth),
        "num_verified": np.full(num_drafts, depth),
        "num_accepted": accepted,
        "confidence": confidence,
        "predicted": np.full_like(confidence, np.nan),
    }
    return RecordedTrace(
        {f"step_{name}": np.asarray(value) for name, value in steps.items()}
        | {f"draft_{name}": np.asarray(value) for name, value in drafts.items()}
    )


@pytest.fixture(scope="module")
def traces() -> dict[Arm, RecordedTrace]:
    return {arm: make_trace(arm.draft_tokens) for arm in FIXED}


@pytest.fixture(scope="module")
def with_goodput(traces: dict[Arm, RecordedTrace]) -> dict[Arm, RecordedTrace]:
    # It makes the decisions of fixed:2 and costs as much.
    return {**traces, GOODPUT: make_trace(2)}


@pytest.fixture(scope="module")
def bounds(with_goodput: dict[Arm, RecordedTrace]) -> dict[str, Any]:
    found = find_bounds(with_goodput)
    assert found is not None
    return found


# Prices


def test_a_curve_follows_medians_and_never_falls() -> None:
    counts = np.array([1, 1, 1, 2, 2, 2, 4, 4, 4.0])
    measured = np.array([10, 10, 900, 14, 14, 14, 12, 12, 12.0])
    curve = fit_curve(counts, measured)
    # 14 at two and 12 at four tokens pool to 13.
    np.testing.assert_allclose(curve.at(np.array([1.0, 2.0, 4.0])), [10, 13, 13])


def test_a_curve_goes_on_with_its_slope_on_both_sides() -> None:
    curve = PriceCurve(np.array([2.0, 4.0]), np.array([10.0, 14.0]))
    np.testing.assert_allclose(curve.at(np.array([1.0, 3.0, 6.0])), [8.0, 12.0, 18.0])


def test_small_steps_are_not_free_whatever_the_slope() -> None:
    # By the slope, 10 tokens would cost -1 ms.
    curve = PriceCurve(np.array([20.0, 24.0]), np.array([10.0, 14.4]))
    assert curve.at(10.0) == pytest.approx(5.0)
    assert curve.at(19.5) == pytest.approx(9.75)


def test_prices_are_those_of_the_engine_that_was_recorded(
    traces: dict[Arm, RecordedTrace],
) -> None:
    prices = fit_prices(traces)
    assert prices is not None
    for num_tokens, depth in product((6, 15, 30), range(MAX_DEPTH + 1)):
        expected = true_ms(num_tokens, depth)
        assert prices.shared.step_ms(num_tokens, depth) == pytest.approx(expected)


def test_every_arm_pays_for_its_own_planning_and_its_own_watch(
    traces: dict[Arm, RecordedTrace],
) -> None:
    dear = make_trace(3, host_ms=HOST_MS + 0.5, pass_ms=PASS_MS + 0.25)
    prices = fit_prices({**traces, GOODPUT: dear})
    assert prices is not None
    assert prices.of(GOODPUT).host_ms == pytest.approx(HOST_MS + 0.5)
    assert prices.of(GOODPUT).draft_next_ms == pytest.approx(PASS_MS + 0.25)
    fixed = prices.of(FIXED[2])
    assert (fixed.host_ms, fixed.draft_next_ms) == pytest.approx((HOST_MS, PASS_MS))
    # No selector may be bounded by the dearer of the two.
    assert prices.cheapest.host_ms == pytest.approx(HOST_MS)


def test_steps_with_prompts_and_outside_the_steady_part_do_not_set_prices() -> None:
    trace = make_trace(2)
    trace.arrays["step_num_prefill_tokens"][1::2] = 100
    trace.arrays["step_target_ms"][1::2] = 1000.0
    trace.arrays["window"] = np.array([100, 300])
    trace.arrays["step_target_ms"][:100] = 2000.0
    trace.arrays["step_target_ms"][300:] = 2000.0
    prices = fit_prices({FIXED[1]: trace})
    assert prices is not None
    assert prices.shared.step_ms(18.0, 2) == pytest.approx(true_ms(18, 2))


# Replay


def test_ramp_drain_and_drafts_whose_outcome_is_unknown_are_left_out() -> None:
    trace = make_trace(2, num_steps=10)
    trace.arrays["draft_num_accepted"][0] = -1
    trace.arrays["draft_num_verified"][0] = 0
    assert len(read_steps(trace, 2)) == 9
    trace.arrays["window"] = np.array([4, 9])
    assert len(read_steps(trace, 2)) == 5
    own = play_own(trace, PRICES)
    assert own is not None
    assert own.tokens.size == 5


def test_deeper_drafts_are_cut_to_what_the_policy_may_draft() -> None:
    step = read_steps(make_trace(5, num_steps=1), 2)[0]
    assert step.confidence.shape == (NUM_REQS, 2)
    assert step.num_offered.max() == 2
    assert step.num_accepted.max() <= 2


def test_a_planner_is_charged_like_the_fixed_length_it_keeps_to() -> None:
    steps = read_steps(make_trace(4), 4)
    planned = play_planner(steps, FixedPlanner(3), PRICES)
    fixed = play_fixed(steps, PRICES, 3)
    np.testing.assert_allclose(planned.ms, fixed.ms)
    np.testing.assert_allclose(planned.tokens, fixed.tokens)


class StoppingPlanner(FixedPlanner):
    """Ends every draft as soon as no request is likely to gain a token."""

    def __init__(self, draft_tokens: int, pass_price: float) -> None:
        super().__init__(draft_tokens)
        object.__setattr__(self, "pass_price", pass_price)

    def early_exit(self, req_ids: Any, weights: Any = None) -> EarlyExitRule:
        from policies.estimators.calibration import ConfidenceCalibration

        return EarlyExitRule(
            req_ids=tuple(req_ids),
            scale=ConfidenceCalibration(4, 0.0, 1.0).scale(req_ids),
            max_depth=4,
            next_acceptance=np.ones(1),
            pass_price=self.pass_price,  # type: ignore[attr-defined]
            token_price=0.0,
        )


def test_a_draft_ends_after_the_pass_that_leaves_too_little() -> None:
    trace = make_trace(4, num_steps=3)
    # Survival of all six together: 3 after one pass, 1.5 after two, .75 after three.
    trace.arrays["draft_confidence"][:] = 0.5
    steps = read_steps(trace, 4)

    played = {
        price: play_planner(steps, StoppingPlanner(4, price), PRICES)
        for price in (0.0, 1.0, 2.0, 9.0)
    }

    depths = {0.0: 4, 1.0: 3, 2.0: 2, 9.0: 1}
    for price, depth in depths.items():
        fixed = play_fixed(steps, PRICES, depth)
        np.testing.assert_allclose(played[price].ms, fixed.ms)
        np.testing.assert_allclose(played[price].tokens, fixed.tokens)


class EveryOtherStep(FixedPlanner):
    """Skips the drafter in every second step."""

    def choose_depth(self, num_reqs: int, latency_target_ms: Any = None) -> int:
        asked = getattr(self, "asked", 0)
        object.__setattr__(self, "asked", asked + 1)
        return 0 if asked % 2 else self.draft_tokens


def test_a_skipped_drafter_is_charged_for_catching_up() -> None:
    steps = read_steps(make_trace(2, num_steps=4), 2)
    planner = EveryOtherStep(2)

    played = play_planner(steps, planner, PRICES)

    # The first step verifies two drafts each and skips the drafter after it, which
    # then misses 18 positions; the second verifies nothing and drafts again.
    assert played.ms[0] == pytest.approx(true_ms(18, 0))
    assert played.ms[1] == pytest.approx(true_ms(6, 2) + first_ms(18))
    assert played.tokens[1] == NUM_REQS


def test_an_arm_pays_for_catching_up_in_its_own_trace() -> None:
    free, dear = (
        play_own(make_trace(2, num_steps=10, first_backlog_ms=ms), PRICES)
        for ms in (0.0, 50.0)
    )
    assert free is not None
    assert dear is not None
    assert dear.ms.sum() - free.ms.sum() == pytest.approx(50.0)


def test_foresight_tries_every_depth_and_verifies_only_what_is_accepted() -> None:
    steps = read_steps(make_trace(3, num_steps=5), 3)
    speed = play_clairvoyant(steps, PRICES, 3).tokens_per_s()
    # By brute force: at the best ratio no choice of depths does better.
    best = 0.0
    for depths in product(range(4), repeat=len(steps)):
        gains = [
            NUM_REQS + int(np.minimum(step.num_accepted, depth).sum())
            for step, depth in zip(steps, depths, strict=True)
        ]
        cost = sum(true_ms(g, d) for g, d in zip(gains, depths, strict=True))
        best = max(best, 1e3 * sum(gains) / cost)
    assert speed >= best * (1 - 1e-4)
    assert play_fixed(steps, PRICES, 3).tokens_per_s() < speed


def test_hindsight_does_what_the_policy_does_and_knows_what_it_learns(
    traces: dict[Arm, RecordedTrace],
) -> None:
    steps = read_steps(traces[FIXED[-1]], MAX_DEPTH)

    hindsight = play_hindsight(steps, PRICES, MAX_DEPTH)
    online = play_online(steps, PRICES, MAX_DEPTH, {})

    # Both keep away from what will be rejected: half of the requests are hard.
    fixed = [play_fixed(steps, PRICES, k).tokens_per_s() for k in range(1, 6)]
    assert hindsight.tokens_per_s() > 1.02 * max(fixed)
    # What is left between them is learning and probing.
    assert 0.97 < online.tokens_per_s() / hindsight.tokens_per_s() < 1.01


def test_who_knows_all_prices_verifies_in_every_step() -> None:
    trace = make_trace(2, num_steps=PROBE_EVERY)
    trace.arrays["draft_confidence"][:] = 0.99
    trace.arrays["draft_num_accepted"][:] = 2
    steps = read_steps(trace, 2)
    # Now and then the policy verifies nothing, to learn what that costs.
    assert (play_online(steps, PRICES, 2, {}).tokens == NUM_REQS).any()
    assert (play_hindsight(steps, PRICES, 2).tokens > NUM_REQS).all()


def test_hindsight_stops_drafting_where_drafting_is_too_dear() -> None:
    steps = read_steps(make_trace(3), 3)
    dear = StepPrices(
        PRICES.target,
        PriceCurve(np.array([1.0, 100.0]), np.array([400.0, 500.0])),
        300.0,
        HOST_MS,
    )
    hindsight = play_hindsight(steps, dear, 3)
    plain = play_fixed(steps, dear, 0).tokens_per_s()
    assert hindsight.tokens_per_s() == pytest.approx(plain)


# Bounds


def test_no_selector_beats_foresight_and_hindsight_beats_every_constant(
    bounds: dict[str, Any],
) -> None:
    best_fixed = max(bounds["fixed"].values())
    assert bounds["none"] < bounds["clairvoyant"]
    assert best_fixed < bounds["hindsight"] < bounds["clairvoyant"]
    assert bounds["replayed"] < bounds["clairvoyant"]


def test_a_fixed_arm_achieves_what_replaying_it_foretells() -> None:
    steps = read_steps(make_trace(MAX_DEPTH, 800), MAX_DEPTH)
    for arm in FIXED:
        own = play_own(make_trace(arm.draft_tokens, 800), PRICES)
        assert own is not None
        foretold = play_fixed(steps, PRICES, arm.draft_tokens)
        # Shallower arms had other luck: 4800 drafts of their own.
        luck = 1e-9 if arm is FIXED[-1] else 0.03
        assert foretold.tokens_per_s() == pytest.approx(own.tokens_per_s(), rel=luck)


def test_no_speculation_costs_its_plain_steps(bounds: dict[str, Any]) -> None:
    assert bounds["none"] == pytest.approx(1e3 * NUM_REQS / true_ms(NUM_REQS, 0))


def test_a_policy_that_does_as_a_fixed_arm_has_as_little_of_the_headroom(
    traces: dict[Arm, RecordedTrace],
) -> None:
    best = _best_own(traces)
    found = find_bounds({**traces, GOODPUT: traces[best]})
    assert found is not None
    assert found["best_fixed_achieved"] == best.name
    share = found["headroom_share"]
    assert share["value"] == pytest.approx(0.0, abs=1e-9)
    assert share["low"] == pytest.approx(0.0, abs=1e-9)


def _best_own(traces: dict[Arm, RecordedTrace]) -> Arm:
    speeds = {}
    for arm in FIXED:
        played = play_own(traces[arm], PRICES)
        assert played is not None
        speeds[arm] = played.tokens_per_s()
    return max(speeds, key=lambda arm: speeds[arm])


def test_dear_planning_takes_its_share_of_the_headroom(
    traces: dict[Arm, RecordedTrace],
) -> None:
    depth = _best_own(traces).draft_tokens
    found = [
        find_bounds({**traces, GOODPUT: make_trace(depth, host_ms=host_ms)})
        for host_ms in (HOST_MS, HOST_MS + 2.0)
    ]
    cheap, dear = (one for one in found if one is not None)
    # 2 ms of 60 or so are 3 % of the speed.
    lost = cheap["headroom_share"]["value"] - dear["headroom_share"]["value"]
    assert lost > 0.1
    # Hindsight plans as much; foresight need not.
    assert dear["hindsight"] < 0.98 * cheap["hindsight"]
    assert dear["clairvoyant"] == pytest.approx(cheap["clairvoyant"])


def test_a_share_has_an_interval_that_more_steps_narrow() -> None:
    def width(num_steps: int) -> float:
        traces = {arm: make_trace(arm.draft_tokens, num_steps) for arm in FIXED}
        found = find_bounds({**traces, GOODPUT: make_trace(2, num_steps)})
        assert found is not None
        share = found["headroom_share"]
        assert share["low"] <= share["value"] <= share["high"]
        return float(share["high"] - share["low"])

    assert width(480) < 0.8 * width(60)


def test_without_headroom_there_is_no_share_of_it() -> None:
    # Drafts that are always accepted: nothing is gained by choosing among them.
    traces = {arm: make_trace(arm.draft_tokens, 60) for arm in (*FIXED, GOODPUT)}
    for trace in traces.values():
        trace.arrays["draft_confidence"][:] = 0.999
        offered = trace.arrays["draft_num_offered"]
        trace.arrays["draft_num_accepted"] = offered.copy()
    found = find_bounds(traces)
    assert found is not None
    assert found["headroom"] < MIN_HEADROOM
    assert found["headroom_share"] is None


def test_bounds_need_recorded_drafts_as_deep_as_the_policy(
    traces: dict[Arm, RecordedTrace],
) -> None:
    deeper = parse_arm("goodput:8")
    assert find_bounds({**traces, deeper: make_trace(8)}) is None
    assert find_bounds({GOODPUT: make_trace(MAX_DEPTH)}) is None


def test_an_arm_that_lends_its_drafts_is_no_rival(
    with_goodput: dict[Arm, RecordedTrace],
) -> None:
    lender = FIXED[-1]
    compared = [arm for arm in with_goodput if arm != lender]
    found = find_bounds(with_goodput, compared)
    assert found is not None
    assert found["drafts_of"] == lender.name
    assert lender.name not in found["fixed"]
    assert lender.name not in found["achieved"]


def test_a_folder_with_traces_has_its_bounds_printed(
    tmp_path: Path,
    with_goodput: dict[Arm, RecordedTrace],
    bounds: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = Cell("mixed", 0.0, NUM_REQS)
    drifting = Cell("drift-context", 0.0, NUM_REQS)
    store = Store(tmp_path)
    names = [arm.name for arm in with_goodput]
    store.check_conditions({"policies": names})
    for one in (cell, drifting):
        store.append_record([{"policy": n, "round": 1} | one.as_dict() for n in names])
        for arm, trace in with_goodput.items():
            path = store.trace_file(one, arm)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **trace.arrays)

    main([str(tmp_path)])

    # Prices change in a drifting cell: one set of them fits neither half.
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [cell.name]
    assert found[cell.name]["hindsight"] == pytest.approx(bounds["hindsight"])
