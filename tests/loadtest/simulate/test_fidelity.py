"""Fits and comparisons, on runs that the simulator itself has made."""

import json
from dataclasses import replace

import numpy as np
import pytest

from loadtest.simulate.drawn import Drawn
from loadtest.simulate.fidelity import (
    Recorded,
    compare,
    fit,
    render,
    render_rows,
    simulate,
)
from loadtest.simulate.show import FOLDER, marks

TERMS = (8.0, 0.8, 0.3, 1.5, 0.1, 6.0, 0.2)
CHANCE = 0.6


def make_run(arm: str, rate_per_s: float, seed: int) -> Recorded:
    rng = np.random.default_rng(seed)
    count = 150
    drawn = Drawn(
        np.cumsum(rng.exponential(1 / rate_per_s, count)),
        rng.integers(20, 200, count),
        rng.integers(20, 96, count),
        np.zeros(count, np.int64),
    )
    num_drafts = int(arm.partition(":")[2] or 0)
    nothing = np.zeros(count)
    asked = Recorded(
        *(arm, f"poisson:{rate_per_s:g}", 2, num_drafts, drawn),
        *(nothing, nothing, nothing),
        tokens_per_draft=CHANCE + CHANCE**2 if num_drafts else 0.0,
    )
    return simulate(asked, TERMS, CHANCE)


def make_runs(rates: tuple[float, ...]) -> list[Recorded]:
    return [make_run(arm, rate, 7) for arm in ("none", "fixed:2") for rate in rates]


def test_a_model_fitted_to_some_runs_foretells_others():
    terms, chance = fit(make_runs((1.0, 6.0)))
    assert chance == pytest.approx(CHANCE)
    for row in compare(make_runs((3.0,)), terms, chance):
        assert row["tpot_p50_ms"]["agrees"]
        assert row["ttft_p50_ms"]["agrees"]


def test_a_wrong_model_does_not_agree():
    slower = [2 * term for term in TERMS]
    rows = compare(make_runs((3.0,)), slower, CHANCE)
    assert not any(row["tpot_p50_ms"]["agrees"] for row in rows)
    assert "**" in render_rows(rows)


def test_what_real_runs_differ_by_is_allowed():
    run = make_run("none", 3.0, 7)
    slower = replace(run, tpot_ms=2 * run.tpot_ms)
    (row,) = compare([run, slower], TERMS, CHANCE)
    assert row["runs"] == 2
    assert row["tpot_p50_ms"]["error"] < -0.3
    assert row["tpot_p50_ms"]["agrees"]


def test_the_committed_table_is_that_of_the_committed_figures():
    begin, end = marks("fidelity")
    table = (FOLDER / "README.md").read_text("utf-8").partition(begin)[2]
    found = json.loads((FOLDER / "fidelity.json").read_text("utf-8"))
    assert table.partition(end)[0] == render(found)
    assert found["held_out"]
    assert {row["runs"] for row in found["held_out"]} == {2}
