"""In which order rounds, cells, blocks and arms are measured, by fake engines."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtest import experiment
from loadtest.arms import Arm
from loadtest.bench_command import EXIT_INTERRUPTED, EXIT_MORE_TO_DO
from loadtest.engine import cli, run
from loadtest.engine.plan import Block
from loadtest.errors import LoadTestError
from loadtest.result_folder import ResultFolder
from tests.loadtest.engine.made_up import CELL, measured

GPU = "NVIDIA Stand-in"
NAMES = ("none", "fixed:2", "goodput:4")
PLACE = ("policy", "round", "block", "engine_start", *asdict(CELL))
CELLS = ("--workloads", "mixed", "--concurrency", "1,2", "--temperatures", "0")


class FakeEngines:
    """Stand in for the processes: measure nothing, and note who ran when."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.widths: list[int] = []
        self.num_open = 0
        self.fails_after: int | None = None

    @contextmanager
    def start(
        self, arms: Sequence[Arm], deploy: Any, log_folder: Path, say: Any
    ) -> Iterator[dict[Arm, Any]]:
        self.num_open += 1
        assert self.num_open == 1
        self.widths.append(len(arms))
        try:
            yield {arm: SimpleNamespace(ask=partial(self.ask, arm)) for arm in arms}
        finally:
            self.num_open -= 1

    def ask(self, arm: Arm, name: str, block: Block, *trace: Any) -> dict[str, Any]:
        if not trace:  # It warms up.
            return {}
        if self.fails_after == len(self.notes):
            raise KeyboardInterrupt
        self.notes.append(f"{arm.name} {block.concurrency}")
        digests = ["a"] * (len(block.prompts) - 1) + [arm.policy]
        speed = 100.0 + arm.max_depth
        # The one that drafts needs a block more for as long a window.
        window_s = 1.0 if arm.policy == "goodput" else 1.5
        more = {"num_tokens": window_s * speed, "digests": digests}
        result = measured(arm.policy, 1, speed, window_s=window_s, **more)
        for name in (*PLACE, "num_differing_requests"):
            del result[name]
        return result


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    engines = FakeEngines()
    monkeypatch.setattr(run, "start_engines", engines.start)
    return engines


def bench(folder: Path, *more: str) -> int:
    options = ("--preset", "smoke", "--output", str(folder))
    return cli.main([*options, "--policies", ",".join(NAMES), *CELLS, *more])


def test_arms_take_turns_block_by_block_until_all_had_their_time(tmp_path, engines):
    assert bench(tmp_path, "--window-s", "3", "--rounds", "2") == 0

    # Three blocks a cell: goodput's have 1 s.
    assert len(engines.notes) == 2 * 2 * 3 * 3
    for first in range(0, len(engines.notes), 3):
        block = [note.split() for note in engines.notes[first : first + 3]]
        assert sorted(name for name, _ in block) == sorted(NAMES)
        assert len({concurrency for _, concurrency in block}) == 1
    # Engines start anew in every round, all of them side by side.
    assert engines.widths == [3, 3]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    for row in rows:
        assert row["rounds"] == row["engine_starts"] == 2
        assert row["window_s"] >= 6.0
        differing = 0 if row["policy"] == "none" else 6
        assert row["num_differing_requests"] == differing


def test_an_interrupted_run_goes_on_with_the_cell_that_it_was_at(
    tmp_path, engines, capsys
):
    assert bench(tmp_path, "--rounds", "1", "--minutes", "1e-9") == EXIT_MORE_TO_DO
    assert engines.widths == []
    engines.fails_after = 4
    assert bench(tmp_path, "--rounds", "1") == EXIT_INTERRUPTED
    assert "goes on from there" in capsys.readouterr().err
    kept = ResultFolder(tmp_path).measurements()
    assert {one["concurrency"] for one in kept} == {1}

    engines.fails_after = None
    engines.notes = []
    assert bench(tmp_path, "--rounds", "1") == 0

    assert [note.split()[1] for note in engines.notes] == ["2"] * 3
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["environment"]["pieces"]) == 3
    assert {row["rounds"] for row in results["rows"]} == {1}


def test_a_limit_that_is_reached_within_a_round_keeps_its_finished_cells(
    tmp_path, engines, monkeypatch
):
    # Noted at the beginning, and looked at before engines start and before each cell.
    looks = iter([0.0, 0.0, 0.0])
    clock = SimpleNamespace(monotonic=lambda: next(looks, 1e9))
    monkeypatch.setattr(experiment, "time", clock)
    assert bench(tmp_path, "--rounds", "1", "--minutes", "1") == EXIT_MORE_TO_DO
    assert engines.widths == [3]
    kept = ResultFolder(tmp_path).measurements()
    assert {one["concurrency"] for one in kept} == {1}


def test_other_conditions_are_not_mixed_and_a_restart_discards_ours_alone(
    tmp_path, capsys
):
    mine = tmp_path / "notes.txt"
    mine.write_text("keep")
    assert bench(tmp_path, "--rounds", "1") == 0
    assert bench(tmp_path, "--rounds", "1", "--max-tokens", "33") == 1
    told = capsys.readouterr().err
    assert "max_tokens: was 32, is 33" in told
    assert "--restart" in told
    assert "dtype" not in told
    assert bench(tmp_path, "--restart", "--workloads", "wrong") == 1
    assert len(ResultFolder(tmp_path).records()) == 2
    assert bench(tmp_path, "--rounds", "1", "--max-tokens", "33", "--restart") == 0
    assert len(ResultFolder(tmp_path).records()) == 2
    assert mine.exists()


def test_on_a_gpu_one_engine_at_a_time_goes_through_all_cells(
    tmp_path, engines, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "find_gpu", lambda: GPU)
    assert bench(tmp_path, "--device", "gpu", "--rounds", "2") == 0

    assert engines.widths == [1] * 6
    assert len(engines.notes) == 2 * 3 * 2
    for first in range(0, len(engines.notes), 2):
        name = engines.notes[first].split()[0]
        assert engines.notes[first : first + 2] == [f"{name} 1", f"{name} 2"]
    assert {note.split()[0] for note in engines.notes[:6]} == set(NAMES)
    table = (tmp_path / "results.md").read_text()
    assert f"\n\n{GPU}; target" in table
    assert "| none | 1.040 (1.040-1.040) | 1.040 (1.040-1.040) | 1.040" in table
    monkeypatch.setattr(cli, "find_gpu", lambda: "Another")
    assert bench(tmp_path, "--device", "gpu", "--rounds", "2") == 1
    assert f"gpu: was {GPU!r}, is 'Another'" in capsys.readouterr().err


def test_what_hinders_is_told_in_its_own_words(tmp_path, engines, monkeypatch, capsys):
    def fail(*_: Any, **__: Any) -> None:
        raise LoadTestError("the engine of none has ended; out of memory")

    monkeypatch.setattr(FakeEngines, "ask", fail)
    assert bench(tmp_path, "--rounds", "1") == 1
    assert "out of memory" in capsys.readouterr().err
    # A machine too small for all engines is told before they start.
    memory = argparse.Namespace(available=3 << 30, total=3 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    engines.widths = []
    assert bench(tmp_path, "--rounds", "1") == 1
    assert "name at most 2 with --policies" in capsys.readouterr().err
    assert engines.widths == []
