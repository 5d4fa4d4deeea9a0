"""Fits and comparisons, on runs that the simulator itself has made."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.simulate import fidelity
from loadtest.simulate.drawn import Drawn
from loadtest.simulate.fidelity import (
    Recorded,
    compare,
    fit,
    judge,
    main,
    render,
    render_rows,
    simulate,
)
from loadtest.simulate.show import FOLDER, marks

TERMS = (8.0, 0.8, 0.3, 1.5, 0.1, 6.0, 0.2)
CHANCE = 0.6


def make_run(arm: str, rate_per_s: float, seed: int) -> Recorded:
    rng = np.random.default_rng(seed)
    count = 80
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


def make_steady(factors: tuple[float, ...]) -> list[Recorded]:
    """Return runs on the same requests, whose latencies are multiples."""
    run = make_run("none", 3.0, 7)
    return [replace(run, tpot_ms=run.tpot_ms * factor) for factor in factors]


def test_a_model_fitted_to_some_runs_foretells_others():
    terms, chance = fit(make_runs((1.0, 6.0)))
    assert chance == pytest.approx(CHANCE)
    for row in compare(make_runs((3.0,)), terms, chance):
        assert abs(row["tpot_p50_ms"]["error"]) < 0.1
        assert abs(row["ttft_p50_ms"]["error"]) < 0.1


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.0, 1.0), "agrees"),
        ((1.0,), "undecided"),  # One run does not say what others would.
        ((1.0, 2.0), "undecided"),
        ((1.049, 1.051), "agrees"),
        ((1.09, 1.11), "undecided"),
        ((1.999, 2.001), "off"),
    ],
)
def test_a_figure_agrees_or_is_off_with_its_whole_interval(
    factors: tuple[float, ...], verdict: str
) -> None:
    (row,) = compare(make_steady(factors), TERMS, CHANCE)
    assert row["tpot_p50_ms"]["verdict"] == verdict
    assert ("**" in render_rows([row])) == (verdict == "off")
    assert row["runs"] == len(factors)


def test_a_chance_of_drafts_is_that_of_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [
        replace(run, num_drafts=depth, tokens_per_draft=sum(powers[:depth]))
        for powers in [[CHANCE, CHANCE**2, CHANCE**3, CHANCE**4]]
        for depth, run in zip((1, 4), make_steady((1.0, 1.0)), strict=True)
    ]
    monkeypatch.setattr(
        "loadtest.simulate.fidelity.optimize.minimize",
        lambda *_args, **_options: SimpleNamespace(x=np.zeros(len(TERMS))),
    )
    assert fit(runs)[1] == pytest.approx(CHANCE)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (None, "is no folder"),
        ({"arm": "ours", "load": "poisson:1"}, "only none and fixed:K in open loop"),
        ({"load": "poisson:1"}, "'arm'"),
    ],
)
def test_what_is_no_folder_of_such_runs_is_explained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: dict[str, str] | None,
    message: str,
) -> None:
    folder = tmp_path / "runs"
    if run:
        folder.mkdir()
        (folder / "runs.jsonl").write_text(json.dumps(run))
    with pytest.raises(SystemExit):
        main([str(folder), "--fit", "poisson:1"])
    assert message in capsys.readouterr().err
    assert folder.exists() == bool(run)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_figure_that_is_off_is_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    factor: float,
) -> None:
    loads = {"fitted": 1.0, "held": factor}
    runs = [
        replace(run, load=load)
        for load, own in loads.items()
        for run in make_steady((own, own))
    ]
    (tmp_path / "runs.jsonl").write_text("{}\n" * len(runs))
    source = iter(runs)
    monkeypatch.setattr(fidelity, "read_run", lambda *_: next(source))
    monkeypatch.setattr(fidelity, "fit", lambda _: (list(TERMS), CHANCE))
    assert main([str(tmp_path), "--fit", "fitted"]) == (factor == 2.0)
    assert f"off {int(factor == 2.0)}, undecided" in capsys.readouterr().out


def test_the_committed_table_is_that_of_the_committed_figures():
    begin, end = marks("fidelity")
    table = (FOLDER / "README.md").read_text("utf-8").partition(begin)[2]
    found = json.loads((FOLDER / "fidelity.json").read_text("utf-8"))
    assert table.partition(end)[0] == render(found)
    assert found["held_out"]
    for row in found["held_out"]:
        for one in (one for one in row.values() if isinstance(one, dict)):
            assert one["verdict"] == judge(
                one["error"], one["half_width"] / one["real"]
            )
    assert {row["runs"] for row in found["held_out"]} == {2}
