"""In which order rounds, cells, blocks and arms are measured, by fake engines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from loadtest.arms import Arm, parse_arm
from loadtest.client.errors import LoadTestError
from loadtest.engine import cli, run
from loadtest.engine.plan import Plan, shuffle
from loadtest.engine.store import Store
from tests.loadtest.engine.made_up import result

GPU = "NVIDIA Stand-in"
NAMES = ("none", "fixed:2", "goodput:4")
CELLS = ("--workloads", "mixed", "--concurrency", "1,2", "--temperatures", "0")


class FakePool:
    """Stands in for the processes: measures nothing, and notes who ran when."""

    notes: list[str]
    open_pools: int
    widths: list[int]
    fails_after: int | None

    def __init__(self, plan: Plan, log_folder: Path) -> None:
        self._plan = plan

    def __enter__(self) -> FakePool:
        FakePool.open_pools += 1
        assert FakePool.open_pools == 1
        return self

    def __exit__(self, *error: object) -> None:
        FakePool.open_pools -= 1

    def start(
        self, arms: Sequence[Arm], eos: int, on_ready: Callable[[Arm], None]
    ) -> None:
        FakePool.widths.append(len(arms))
        for arm in arms:
            on_ready(arm)

    def run(
        self, arm: Arm, message: Mapping[str, Any], *, neighbour: bool = False
    ) -> dict[str, Any]:
        if "max_tokens" in message:  # It warms up.
            return {}
        if FakePool.fails_after == len(FakePool.notes):
            raise KeyboardInterrupt
        FakePool.notes.append(f"{arm.name} {message['concurrency']}")
        more = {"digests": ["a"] * (len(message["prompts"]) - 1) + [arm.policy]}
        if self._plan.gpu:
            more["trace"] = message.get("trace")
        speed = 100.0 + arm.max_depth
        # The one that drafts needs a block more for as long a window.
        window_s = 1.0 if arm.policy == "goodput" else 1.5
        tokens = {"window_s": window_s, "num_tokens": window_s * speed}
        speculates = arm.policy != "none"
        return result(speed, speculates=speculates) | tokens | more


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> type[FakePool]:
    for name, value in {
        "notes": [],
        "open_pools": 0,
        "widths": [],
        "fails_after": None,
    }.items():
        monkeypatch.setattr(FakePool, name, value, raising=False)
    monkeypatch.setattr(run, "Pool", FakePool)
    return FakePool


def bench(folder: Path, *more: str, cells: Sequence[str] = CELLS) -> int:
    options = ("--smoke", "--output", str(folder), "--policies", ",".join(NAMES))
    return cli.main([*options, *cells, *more])


def test_arms_take_turns_block_by_block_until_all_had_their_time(
    tmp_path: Path, pool: type[FakePool]
) -> None:
    assert bench(tmp_path, "--window-s", "3", "--rounds", "2") == 0

    # Three blocks a cell: goodput's have 1 s.
    assert len(pool.notes) == 2 * 2 * 3 * 3
    for first in range(0, len(pool.notes), 3):
        block = [note.split() for note in pool.notes[first : first + 3]]
        assert sorted(name for name, _ in block) == sorted(NAMES)
        assert len({concurrency for _, concurrency in block}) == 1
    # Engines start anew in every round, all of them side by side.
    assert pool.widths == [3, 3]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    for row in rows:
        assert row["rounds"] == row["engine_starts"] == 2
        assert row["window_s"] >= 6.0
        differing = 0 if row["policy"] == "none" else 6
        assert row["num_differing_requests"] == differing


def test_an_interrupted_run_goes_on_with_the_cell_that_it_was_at(
    tmp_path: Path, pool: type[FakePool], capsys: pytest.CaptureFixture[str]
) -> None:
    pool.fails_after = 4
    assert bench(tmp_path, "--rounds", "1") == cli.EXIT_INTERRUPTED
    assert "goes on from there" in capsys.readouterr().err
    assert {cell.concurrency for _, cell in Store(tmp_path).done()} == {1}

    pool.fails_after = None
    pool.notes = []
    assert bench(tmp_path, "--rounds", "1") == 0

    assert [note.split()[1] for note in pool.notes] == ["2"] * 3
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["environment"]["pieces"]) == 2
    assert {row["rounds"] for row in results["rows"]} == {1}


def test_whoever_runs_out_of_time_is_told_that_there_is_more(
    tmp_path: Path, pool: type[FakePool]
) -> None:
    assert bench(tmp_path, "--minutes", "1e-9") == cli.EXIT_MORE_TO_DO
    assert pool.widths == []


def test_other_conditions_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--rounds", "1") == 0
    assert bench(tmp_path, "--rounds", "1", "--max-tokens", "33") == 1
    assert "max_tokens: was 32, is 33" in capsys.readouterr().err


def test_on_a_gpu_one_engine_at_a_time_goes_through_all_cells(
    tmp_path: Path,
    pool: type[FakePool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "find_gpu", lambda: GPU)
    assert bench(tmp_path, "--device", "gpu", "--rounds", "2") == 0

    assert pool.widths == [1] * 6
    assert len(pool.notes) == 2 * 3 * 2
    for first in range(0, len(pool.notes), 2):
        name = pool.notes[first].split()[0]
        assert pool.notes[first : first + 2] == [f"{name} 1", f"{name} 2"]
    assert {note.split()[0] for note in pool.notes[:6]} == set(NAMES)
    table = (tmp_path / "results.md").read_text()
    assert f"\n\n{GPU}; target" in table
    assert "| none | 1.040 (1.040-1.040) | 1.040 (1.040-1.040) | 1.040" in table
    monkeypatch.setattr(cli, "find_gpu", lambda: "Another")
    assert bench(tmp_path, "--device", "gpu", "--rounds", "2") == 1
    assert f"gpu: was {GPU!r}, is 'Another'" in capsys.readouterr().err


def test_a_machine_too_small_for_all_engines_is_told_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = argparse.Namespace(available=2 << 30, total=2 << 30)
    monkeypatch.setattr(run.psutil, "virtual_memory", lambda: memory)
    assert bench(tmp_path, "--rounds", "1") == 1
    assert "name at most 2 with --policies" in capsys.readouterr().err
    assert FakePool.widths == []


def test_every_arm_takes_every_place_and_follows_every_other() -> None:
    arms = [parse_arm(name) for name in ("none", "fixed:1", "fixed:2")]

    orders = [shuffle(arms, f"round {number}") for number in range(30)]

    assert orders[0] == shuffle(arms, "round 0")
    assert {pair for order in orders for pair in pairwise(order)} == set(
        permutations(arms, 2)
    )
    assert {order[0] for order in orders} == set(arms)


def test_a_failing_engine_ends_the_run_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LoadTestError("the engine of none has ended; out of memory")

    monkeypatch.setattr(FakePool, "run", fail)
    assert bench(tmp_path, "--rounds", "1") == 1
    assert "out of memory" in capsys.readouterr().err
