"""Ablations of the goodput planner on recorded drafts."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.replay.ablation_scenarios import (
    CELLS,
    DEPTH,
    MEASUREMENTS,
    Stretch,
    fit_measured,
)
from loadtest.replay.ablations import NOTHING, PARTS, play, summarise
from loadtest.replay.replay import ReplayStep


def make_stretch(num_steps: int) -> Stretch:
    rng = np.random.default_rng(0)
    steps = [
        ReplayStep(
            num_reqs=2,
            num_context_tokens=300,
            req_ids=(0, 1),
            confidence=rng.uniform(0.2, 1.0, (2, DEPTH)),
            num_offered=np.full(2, DEPTH),
            num_accepted=rng.integers(0, DEPTH, 2),
        )
        for _ in range(num_steps)
    ]
    return Stretch(steps, fit_measured(MEASUREMENTS).at(2), np.empty(0))


def test_fitted_prices_are_those_that_were_measured():
    prices = fit_measured(MEASUREMENTS)
    # results.md: 8.4 ms without speculation, 18.1 at length 3 and 4 in flight.
    assert prices.at(1).step_ms(1.0, 0) == pytest.approx(8.4, rel=0.1)
    assert prices.at(4).step_ms(16.0, 3) == pytest.approx(18.1, rel=0.1)
    assert prices.at(4, neighbour=True).step_ms(4.0, 0) > prices.at(4).step_ms(4.0, 0)


@pytest.mark.parametrize("part", PARTS)
def test_a_planner_without_a_part_plays_and_the_same_luck_plays_the_same(part: str):
    stretches = [make_stretch(12)] * 2
    first, again = (play(PARTS[part], stretches, 0.1, seed=1) for _ in range(2))
    assert first == again
    assert first["goodput_per_s"] > 0.0


def test_a_benefit_is_paired_by_trace_and_its_interval_is_over_traces():
    def row(part: str, number: int, scenario: str, goodput: float) -> dict[str, object]:
        errors = dict.fromkeys(
            ("calibration_error", "step_time_error", "num_cost_resets"), 0.0
        )
        where = {"scenario": scenario, "cell": CELLS[0].name, "list": number}
        return {"part": part, "goodput_per_s": goodput, "repeat": 0} | where | errors

    rows = [
        row(part, number, scenario, goodput)
        for number, goodputs in enumerate(((102.0, 100.0), (208.0, 200.0)))
        for scenario in ("a", "b")
        for part, goodput in zip((NOTHING, "x"), goodputs, strict=True)
    ]
    found = summarise(rows)["x"]
    # 2 % and 4 %: 3 +- 12.706 / sqrt(2) * sqrt(2).
    assert found["overall"] == {"mean": 3.0, "low": -9.706, "high": 15.706, "n": 2}
    assert found["a"] == found["overall"] == found["overall at temperature 0"]
