"""Bounds, prices and recovery: arithmetic on made-up traces whose truth is known."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.engine_bench.arms import Arm, parse_arm
from loadtest.engine_bench.bounds import (
    find_bounds,
    maximise,
    play_clairvoyant,
    play_fixed,
    read_steps,
    replay_own,
)
from loadtest.engine_bench.plan import Cell
from loadtest.engine_bench.prices import PriceCurve, StepPrices, fit_curve, fit_prices
from loadtest.engine_bench.recovery import (
    find_recovery,
    median_recovery,
    recoveries,
)
from loadtest.engine_bench.report import write_results
from loadtest.engine_bench.store import Store
from loadtest.engine_bench.tables import bound_table, recovery_table
from loadtest.engine_bench.traces import RecordedTrace
from tests.loadtest.test_engine_bench import ENVIRONMENT, measured

MAX_DEPTH = 4
NUM_REQS = 6


def true_ms(num_tokens: float, depth: int) -> float:
    """A step of the made-up engine: 20 + n, a drafter of 2 + .1 n and 3 a pass."""
    target_ms = 20.0 + num_tokens + 1.0
    if depth == 0:
        return target_ms
    return target_ms + 2.0 + 0.1 * num_tokens + 3.0 * (depth - 1)


def make_trace(depth: int, num_steps: int = 400, seed: int = 0) -> RecordedTrace:
    """Record an arm that drafts and verifies `depth` tokens for every request."""
    rng = np.random.default_rng(seed)
    num_drafts = num_steps * NUM_REQS
    confidence = rng.uniform(0.05, 0.99, (num_drafts, depth))
    # The drafter is overconfident: a calibration has something to find.
    passed = rng.random(confidence.shape) < confidence**2
    accepted = np.cumprod(passed, axis=1).sum(axis=1)
    num_tokens = NUM_REQS * (1 + depth)
    every = np.ones(num_steps)
    steps = {
        "num_reqs": NUM_REQS * every,
        "num_decode_tokens": num_tokens * every,
        "num_prefill_tokens": 0 * every,
        "num_context_tokens": 100 * every,
        "target_ms": (20.0 + num_tokens) * every,
        "draft_first_ms": (2.0 + 0.1 * num_tokens) * every if depth else 0 * every,
        "draft_next_ms": 3.0 * max(depth - 1, 0) * every,
        "host_ms": 1.0 * every,
        "depth": depth * every,
    }
    drafts = {
        "step": np.repeat(np.arange(num_steps), NUM_REQS),
        "req": np.tile(np.arange(NUM_REQS), num_steps),
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
    return {
        parse_arm(f"fixed:{depth}"): make_trace(depth)
        for depth in range(1, MAX_DEPTH + 1)
    }


@pytest.fixture(scope="module")
def bounds(traces: dict[Arm, RecordedTrace]) -> dict[str, Any]:
    found = find_bounds(traces)
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


def test_prices_are_those_of_the_engine_that_was_recorded(
    traces: dict[Arm, RecordedTrace],
) -> None:
    prices = fit_prices(traces.values())
    assert prices is not None
    for num_tokens, depth in product((6, 15, 30), range(MAX_DEPTH + 1)):
        expected = true_ms(num_tokens, depth)
        assert prices.step_ms(float(num_tokens), depth) == pytest.approx(expected)


def test_steps_with_prompts_do_not_set_prices() -> None:
    trace = make_trace(2)
    trace.arrays["step_num_prefill_tokens"][::2] = 100
    trace.arrays["step_target_ms"][::2] = 1000.0
    prices = fit_prices([trace])
    assert prices is not None
    assert prices.step_ms(18.0, 2) == pytest.approx(true_ms(18, 2))


# Bounds


def test_no_selector_beats_foresight_and_hindsight_beats_every_constant(
    bounds: dict[str, Any],
) -> None:
    best_fixed = max(bounds["fixed"].values())
    assert bounds["none"] < bounds["clairvoyant"]
    assert best_fixed < bounds["hindsight"] < bounds["clairvoyant"]


def test_a_fixed_arm_achieves_what_replaying_it_foretells(
    bounds: dict[str, Any],
) -> None:
    deepest = f"fixed:{MAX_DEPTH}"
    assert bounds["achieved"][deepest] == pytest.approx(bounds["fixed"][deepest])
    for name, speed in bounds["achieved"].items():
        # Shallower arms had other luck: 2400 drafts of their own.
        assert speed == pytest.approx(bounds["fixed"][name], rel=0.03)


def test_no_speculation_costs_its_plain_steps(bounds: dict[str, Any]) -> None:
    assert bounds["none"] == pytest.approx(1e3 * NUM_REQS / true_ms(NUM_REQS, 0))


def test_the_best_fixed_arm_has_none_of_the_headroom(bounds: dict[str, Any]) -> None:
    best = max(bounds["fixed"], key=lambda name: bounds["fixed"][name])
    assert bounds["headroom_share"][best] == pytest.approx(0.0, abs=0.15)


def test_the_hindsight_calibration_has_found_the_truth(
    traces: dict[Arm, RecordedTrace],
) -> None:
    deepest = traces[parse_arm(f"fixed:{MAX_DEPTH}")]
    steps = read_steps(deepest)
    first = np.concatenate([step.acceptance[:, 0] for step in steps])
    truth = deepest.draft("confidence")[:, 0] ** 2
    assert abs(np.mean(first - truth)) < 0.02
    assert np.corrcoef(first, truth)[0, 1] > 0.95


def test_foresight_tries_every_depth_and_verifies_only_what_is_accepted() -> None:
    trace = make_trace(3, num_steps=5)
    prices = StepPrices(
        PriceCurve(np.array([1.0, 100.0]), np.array([21.0, 120.0])),
        PriceCurve(np.array([1.0, 100.0]), np.array([2.1, 12.0])),
        3.0,
        1.0,
    )
    steps = read_steps(trace)
    speed = maximise(steps, play_clairvoyant(prices, 3))
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
    assert maximise(steps, play_fixed(prices, 3)) < speed


def test_drafts_whose_outcome_is_unknown_are_left_out() -> None:
    trace = make_trace(2, num_steps=10)
    trace.arrays["draft_num_accepted"][0] = -1
    trace.arrays["draft_num_verified"][0] = 0
    assert len(read_steps(trace)) == 9
    prices = fit_prices([trace])
    assert prices is not None
    assert replay_own(trace, prices) is not None


def test_without_a_fixed_arm_there_are_no_bounds() -> None:
    assert find_bounds({parse_arm("goodput:4"): make_trace(4)}) is None


def test_the_table_puts_arms_beside_their_bounds(bounds: dict[str, Any]) -> None:
    row = {"concurrency": 6} | bounds
    row["achieved"] = {"fixed:4": 1.0, "goodput:4": 150.4}
    row["headroom_share"] = {"fixed:4": 0.0, "goodput:4": None}
    header, _, line = bound_table([row]).splitlines()
    assert header.endswith("| clairvoyant | goodput:4 |")
    assert line.startswith(f"| 6 | {bounds['none']:.0f} |")
    assert line.endswith("| 150 (-) |")


# Recovery


def series(step_ms: list[float], tokens: int = 4) -> dict[str, list[float]]:
    return {
        "end_ms": np.cumsum(step_ms).tolist(),
        "tokens": (tokens * np.arange(1, len(step_ms) + 1)).tolist(),
    }


def test_recovery_ends_with_the_last_slow_step() -> None:
    best = series([10.0] * 300)
    assert find_recovery(series([20.0] * 30 + [10.0] * 270), best, window=20) == 30
    assert find_recovery(best, best) == 0


def test_an_arm_may_take_other_steps_for_the_same_tokens() -> None:
    # Half the tokens in half the time is as fast.
    assert find_recovery(series([5.0] * 600, tokens=2), series([10.0] * 300)) == 0


def test_an_arm_that_stays_slow_never_recovers() -> None:
    slow = series([10.4] * 300)
    assert find_recovery(slow, series([10.0] * 300)) is None
    assert find_recovery(slow, series([10.0] * 300), share=0.95) == 0


def test_a_part_too_short_for_a_window_tells_nothing() -> None:
    assert find_recovery(series([10.0] * 20), series([10.0] * 20), window=50) is None


def test_the_fastest_arm_of_a_round_is_what_the_others_are_compared_with() -> None:
    def measured(policy: str, step_ms: float) -> dict[str, Any]:
        return {
            "policy": policy,
            "phases": {"before": 1.0, "after": 1e3 / step_ms},
            "after_switch": series([step_ms] * 200),
        }

    group = [measured("none", 10.0), measured("fixed:3", 20.0)]
    assert recoveries(group) == {"none": 0, "fixed:3": None}
    steady = {"policy": "none", "phases": None, "after_switch": None}
    assert recoveries([steady]) == {}


@pytest.mark.parametrize(
    ("steps", "median"),
    [([3, 9, 4], 4.0), ([3, None, 4], 4.0), ([None, None, 4], None), ([], None)],
)
def test_rounds_without_recovery_count_as_the_longest(
    steps: list[int | None], median: float | None
) -> None:
    assert median_recovery(steps) == median


def test_the_table_shows_steps_to_recovery() -> None:
    rows = [
        {"policy": "goodput:5", "concurrency": 4, "recovery_steps": 12.0},
        {"policy": "fixed:3", "concurrency": 4, "recovery_steps": None},
    ]
    lines = recovery_table(rows).splitlines()
    assert lines[2:] == ["| goodput:5 | 12 |", "| fixed:3 | - |"]


# Report


def test_results_hold_the_bounds_of_every_traced_cell(
    tmp_path: Path, traces: dict[Arm, RecordedTrace], bounds: dict[str, Any]
) -> None:
    cell = Cell("mixed", 0.0, NUM_REQS)
    drifting = Cell("drift-context", 0.0, NUM_REQS)
    store = Store(tmp_path)
    names = [arm.name for arm in traces]
    store.check_conditions(
        {"policies": names, "max_tokens": 96, "dtype": "bfloat16", "cpus": [0]}
    )
    store.write_environment(ENVIRONMENT)
    for one in (cell, drifting):
        store.append_group([measured(name, 1, 100.0) | one.as_dict() for name in names])
        for arm, trace in traces.items():
            path = store.trace_file(one, arm.file_name)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **trace.arrays)

    assert write_results(store)["bounds"] == []
    (found,) = write_results(store, with_bounds=True)["bounds"]

    # Prices change in a drifting cell: one set of them fits neither half.
    assert (found["workload"], found["concurrency"]) == ("mixed", NUM_REQS)
    assert found["hindsight"] == pytest.approx(bounds["hindsight"])
    assert "clairvoyant" in (tmp_path / "results.md").read_text()
