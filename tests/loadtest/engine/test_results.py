"""From measurements to rows, ratios, tables and plots."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine.plan import Cell
from loadtest.engine.report import draw, write_results
from loadtest.engine.summary import (
    ALL_LOADS,
    compare_with_others,
    find_ceilings,
    make_rows,
)
from loadtest.intervals import compare
from loadtest.result_folder import ResultFolder
from tests.loadtest.engine.made_up import CELL, CONDITIONS, ENVIRONMENT, measured

OURS = "goodput:8"
COMMITTED = Path(__file__).parents[3] / "loadtest" / "results" / "engine-cpu"


@pytest.fixture
def store(tmp_path: Path) -> ResultFolder:
    store = ResultFolder(tmp_path / "results")
    store.check_conditions(CONDITIONS)
    store.write_environment(ENVIRONMENT)
    return store


def rounds_of(cell: Cell = CELL, **speeds: Sequence[float]) -> list[dict[str, Any]]:
    """Return rounds counted from 1; 0 where a policy was not measured."""
    names = {"tetris": "tetris:2+2", "goodput": "goodput:8"}
    return [
        measured(names.get(policy, policy), number, speed, cell=cell)
        for policy, own in speeds.items()
        for number, speed in enumerate(own, start=1)
        if speed
    ]


def ratio_of(measurements: Any, concurrency: int = CELL.concurrency) -> Any:
    ratios, _ = compare_with_others(measurements, "tetris:2+2")
    (found,) = [one for one in ratios if one["concurrency"] == concurrency]
    return found


def test_a_group_cut_short_by_a_crash_is_measured_again(store):
    path = store.folder / "measurements.jsonl"
    path.write_text('[{"policy": "none", "rou')

    assert store.records() == []
    store.append_record(rounds_of(none=[100.0]))

    assert [one["num_tokens"] for [one] in store.records()] == [300]


def test_blocks_of_a_round_add_up_before_rounds_are_compared():
    blocks = [
        measured("tetris:2+2", 1, 100.0),
        measured("tetris:2+2", 1, 300.0, window_s=1.0, num_tokens=300, block=1),
        measured("tetris:2+2", 2, 90.0, engine_start="2.1"),
    ]

    (row,) = make_rows(blocks)

    # 600 tokens in 4 s, not the mean of 100 and 300.
    assert row["output_tokens_per_s"] == {"median": 120.0, "min": 90.0, "max": 150.0}
    assert row["rounds"] == row["engine_starts"] == 2
    assert row["window_s"] == 7.0
    assert row["num_requests"] == 36
    assert row["verification_success_rate"] == 0.5
    assert row["verified_per_step"] == 8.0
    assert row["planning_us_per_step"] == pytest.approx(100.0)
    assert row["step_ms"] == pytest.approx((4000 / 20 + 300) / 2)
    # Engines that go on through all rounds count once, and `none` counts no drafts.
    rounds = [measured("none", n, 100.0, engine_start="1.1") for n in (1, 2, 3)]
    (row,) = make_rows(rounds)
    assert (row["rounds"], row["engine_starts"]) == (3, 1)
    assert row["verification_success_rate"] is row["planning_us_per_step"] is None


def test_a_ceiling_is_all_drafts_accepted_at_measured_step_times():
    blocks = [
        measured("none", 1, 100.0, num_steps=30),
        measured("fixed:3", 1, 100.0, num_steps=20),
        measured("goodput:8", 1, 100.0),
        # Where nobody went without speculation, nothing is known.
        measured("fixed:3", 1, 100.0, cell=Cell("mixed", 0.0, 8)),
    ]

    (ceiling,) = find_ceilings(make_rows(blocks))

    # Four tokens in 150 ms, where none takes 100 ms for one.
    assert ceiling == asdict(CELL) | {
        "policy": "fixed:3",
        "ratio": pytest.approx(4 * 100 / 150),
    }
    for block in blocks:
        block["policy"] = block["policy"].replace("fixed:3", "fixed:3:probabilistic")
    (drawn,) = find_ceilings(make_rows(blocks))
    assert drawn == ceiling | {"policy": "fixed:3:probabilistic"}


def test_what_moves_a_whole_round_cancels_in_the_ratio():
    ratio = ratio_of(rounds_of(none=[100, 50, 200], tetris=[110, 55, 220]))
    assert (ratio["policy"], ratio["against"]) == ("tetris:2+2", "none")
    assert [ratio[k] for k in ("ratio", "low", "high")] == pytest.approx([1.1] * 3)
    assert ratio["rounds"] == 3
    # Only common rounds are compared, and one has no interval.
    ratio = ratio_of(rounds_of(none=[100, 100], tetris=[0, 120, 120]))
    assert ratio["ratio"] == pytest.approx(1.2)
    assert (ratio["low"], ratio["rounds"]) == (None, 1)


def test_students_interval_tells_how_well_arms_are_compared():
    # Logarithms 0 and 2 sigma around their mean: t at 97.5 % with one degree is 12.71.
    found = compare([1.0, 1.21], [1.0, 1.0])
    assert found["ratio"] == pytest.approx(1.1)
    assert found["high"] / found["ratio"] == pytest.approx(1.1**12.706, rel=1e-3)


def test_over_all_loads_rounds_compare_with_their_geometric_mean():
    # The last round is not measured at both loads.
    rounds = [
        *rounds_of(none=[100, 100, 1], tetris=[100, 100, 9]),
        *rounds_of(Cell("mixed", 0.0, 8), none=[100, 100], tetris=[400, 400]),
    ]

    ratio = ratio_of(rounds, ALL_LOADS)

    assert ratio["ratio"] == pytest.approx(2.0)
    assert ratio["rounds"] == 2


def test_the_luckiest_of_equals_is_not_held_against_a_policy():
    """Each rival is the fastest by luck in one round, and equal in the others."""
    rivals = {"a": [120, 100, 100], "b": [100, 120, 100], "c": [100, 100, 120]}

    ratios, (best,) = compare_with_others(rounds_of(**rivals, goodput=[110] * 3), OURS)

    assert best["ratio"] > 1.02
    assert best["rounds"] == 3
    assert [one["against"] for one in ratios] == ["a", "b", "c"]
    _, (alone,) = compare_with_others(rounds_of(c=[100], goodput=[110]), OURS)
    assert alone["against"] == "c"
    assert compare_with_others(rounds_of(goodput=[110]), OURS) == ([], [])


def test_results_tell_speeds_ratios_and_where_they_come_from(store):
    for none, tetris in ((100.0, 110.0), (50.0, 55.0)):
        number = len(store.records()) + 1
        own = measured("none", number, none), measured("tetris:2+2", number, tetris)
        store.append_record(own)

    results = write_results(store)
    draw(results, store.folder / "results.png")

    written = json.loads((store.folder / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert written["environment"] == ENVIRONMENT
    table = (store.folder / "results.md").read_text()
    for part in (
        "A CPU; target model (100 M parameters, 01234567), draft",
        "; 2 of 2 cores; bfloat16; replies up to 96 tokens; vllm 0.32.0, ray 2.60.0; ",
        "commit 0f0f0f0f; 2026-11-21.\n",
        "24 to 24 requests, 2 rounds, 2 engine starts a policy",
        "| tetris:2+2 | **82** (1.50, .50) |",
        "| none | 1.100 (1.100-1.100) |",
        "| the best other | 1.100 (1.100-1.100), none |",
        "| tetris:2+2 | 4 | 55-110 | - | 6 | 300.0 | 5.0% | 100 | 8.0 | 0.020 | 10.0 |",
        "| none | 4 | 50-100 | - | 6 | 300.0 | - | - | - | - | 10.0 |",
        "Fallbacks of policies: none.",
    ):
        assert part in table
    assert (store.folder / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_change_on_the_way_and_what_a_policy_fell_back_to_are_told(store):
    # An adaptive policy may verify nothing at all.
    nothing = {"num_steps": 10, "num_verified_tokens": 0, "num_accepted_tokens": 0}
    phases = {"before": 100.0, "after": 60.0}
    drift = Cell("drift-context", 0.0, 4)
    block = measured("tetris:2+2", 1, 80.0, cell=drift, phases=phases)
    store.append_record(
        [block | {"counters": nothing | {"num_fallbacks": {"late": 3}}}]
    )
    write_results(store)
    table = (store.folder / "results.md").read_text()
    assert "| tetris:2+2 | 4 | 80-80 | 100 → 60 |" in table
    assert "| tetris:2+2 | **80** (1.50, -) |" in table
    assert "Fallbacks of policies: tetris:2+2: late." in table


@pytest.mark.parametrize(
    "folder",
    [
        *(".", "cold", "cold-400m", "drift", "small", "smollm2", "smollm2-drawn"),
        *("smollm2-draft-model", "smollm2-draft-model-trained", "smollm2-t1"),
        *("smollm2-tetris", "warm"),
    ],
)
def test_committed_results_are_what_was_measured(folder, tmp_path):
    for name in ("measurements.jsonl", "settings.json", "environment.json"):
        shutil.copy(COMMITTED / folder / name, tmp_path / name)
    committed = json.loads((COMMITTED / folder / "results.json").read_text())
    place = ("policy", "workload", "temperature", "concurrency")

    again = write_results(ResultFolder(tmp_path))

    for part, keys in (("rows", place), ("ratios", (*place, "against"))):
        by_key = {tuple(one[key] for key in keys): one for one in committed[part]}
        assert again[part]
        for row in again[part]:
            before = by_key[tuple(row[key] for key in keys)]
            # In those days it was computed from bins of outcomes.
            kept = {k: v for k, v in row.items() if k != "calibration_error"}
            assert kept == {key: before.get(key) for key in kept}
    assert len(again["rows"]) == len(committed["rows"])
    # Older pages have another form.
    kinds = ("", "-draft-model", "-draft-model-trained", "-t1", "-tetris")
    if folder in {"drift", "small", *(f"smollm2{kind}" for kind in kinds)}:
        page = (COMMITTED / folder / "results.md").read_text()
        assert (tmp_path / "results.md").read_text() == page
