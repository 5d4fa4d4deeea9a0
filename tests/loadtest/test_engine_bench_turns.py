"""How the engine benchmark's arms take turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.engine_bench import telemetry as telemetry_module
from loadtest.engine_bench.arms import Arm, parse_arm
from loadtest.engine_bench.pool import Pool
from loadtest.engine_bench.telemetry import Telemetry
from loadtest.engine_bench.yardstick import MAX_WAIT_S, Yardstick

ARMS = (parse_arm("none"), parse_arm("fixed:2"))


class FakeProcess:
    """Stands in for an arm's process: answers as it was told to, and takes notes."""

    def __init__(self, name: str, events: list[str], notes: list[str]) -> None:
        self.name = name
        self._events = events
        self._notes = notes
        self._stopped = True

    def send(self, message: Mapping[str, Any]) -> None:
        assert not self._stopped
        self._notes.append(f"{self.name} {message['do']}")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        event = self._events.pop(0)
        return {"event": event, "result": {"name": self.name}}

    def is_stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        if not self._stopped:
            self._notes.append(f"{self.name} stops")
        self._stopped = True

    def resume(self) -> None:
        self._notes.append(f"{self.name} goes on")
        self._stopped = False


def run_fakes(
    folder: Path, events: Mapping[Arm, list[str]], *, neighbour: bool
) -> tuple[dict[str, str], list[str]]:
    notes: list[str] = []
    pool = Pool(folder, [0])
    pool._arms = {
        arm: FakeProcess(arm.name, list(answers), notes)  # type: ignore[misc]
        for arm, answers in events.items()
    }
    if neighbour:
        pool._neighbour = FakeProcess("neighbour", [], notes)  # type: ignore[assignment]
    finished = pool.run({arm: {} for arm in events}, neighbour=neighbour)
    return {arm.name: one.result["name"] for arm, one in finished.items()}, notes


def test_arms_alternate_until_the_last_has_finished(tmp_path: Path) -> None:
    none, fixed = ARMS

    results, notes = run_fakes(
        tmp_path,
        {none: ["pause", "done"], fixed: ["pause", "pause", "done"]},
        neighbour=False,
    )

    assert results == {"none": "none", "fixed:2": "fixed:2"}
    turns = [note for note in notes if note.endswith(("run", "continue"))]
    assert turns == [
        "none run",
        "fixed:2 run",
        "none continue",
        "fixed:2 continue",
        "fixed:2 continue",
    ]
    assert notes.count("none stops") == notes.count("none goes on") == 2


def test_the_neighbour_is_there_for_arms_whose_conditions_have_changed(
    tmp_path: Path,
) -> None:
    none, fixed = ARMS

    _, notes = run_fakes(
        tmp_path,
        {none: ["switch", "pause", "done"], fixed: ["pause", "switch", "done"]},
        neighbour=True,
    )

    assert [note for note in notes if not note.endswith("stops")] == [
        "none goes on",
        "none run",
        "neighbour goes on",
        "fixed:2 goes on",
        "fixed:2 run",
        "none goes on",
        "neighbour goes on",
        "none continue",
        "fixed:2 goes on",
        "fixed:2 continue",
        "neighbour goes on",
    ]
    assert notes.count("neighbour stops") == 3


def test_others_may_use_the_machine_while_an_arm_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seconds, the machine's busy seconds, and those of this process.
    readings = iter([(0, 0, 0), (10, 20, 10), (30, 60, 10), (40, 75, 20)])
    monkeypatch.setattr(
        telemetry_module,
        "_read_cpu",
        lambda process: telemetry_module._CpuClock(*map(float, next(readings))),
    )
    telemetry = Telemetry(object())

    telemetry.mark("start")
    with telemetry.paused():
        pass
    telemetry.mark("end")

    # 20 s were its own, in which the machine was busy for 35 s and this process for 20.
    num_cpus = psutil.cpu_count() or 1
    share = telemetry.result()["other_cpu_share"]
    assert share == pytest.approx((35 - 20) / (20 * num_cpus))


class FakeMachine:
    """Stands in for a machine: as fast as told, and its clock moves when waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stolen_s = 0.0
        self.speeds: list[float] = []

    def yardstick(self) -> Yardstick:
        return Yardstick(
            lambda: self.speeds.pop(0) if self.speeds else 0.01,
            lambda: self.stolen_s,
            self.sleep,
            lambda: self.now_s,
        )

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_turn_waits_until_the_machine_is_itself() -> None:
    machine = FakeMachine()
    yardstick = machine.yardstick()
    assert yardstick.before_turn().waited_s == 0.0

    machine.speeds = [0.02, 0.03, 0.012]
    look = yardstick.before_turn()

    assert look.is_calm
    assert look.waited_s == machine.now_s == 0.5


def test_a_machine_that_stays_slow_is_waited_for_once() -> None:
    machine = FakeMachine()
    yardstick = machine.yardstick()

    machine.speeds = [0.02] * 1000
    look = yardstick.before_turn()

    assert not look.is_calm
    assert look.waited_s == pytest.approx(MAX_WAIT_S)
    assert yardstick.before_turn().is_calm


@pytest.mark.parametrize(
    ("stolen_s", "speed", "is_calm"),
    [(0.0, 0.015, True), (0.0, 0.018, False), (0.2, 0.01, False)],
)
def test_a_turn_is_disturbed_by_what_slows_its_end_or_is_stolen(
    stolen_s: float, speed: float, is_calm: bool
) -> None:
    machine = FakeMachine()
    yardstick = machine.yardstick()
    yardstick.before_turn()

    machine.now_s += 1.0
    machine.stolen_s += stolen_s * (psutil.cpu_count() or 1)
    machine.speeds = [speed]

    assert yardstick.after_turn() is is_calm


def test_disturbed_turns_and_waiting_are_counted_for_each_arm(tmp_path: Path) -> None:
    none, fixed = ARMS
    machine = FakeMachine()
    pool = Pool(tmp_path, [0], machine.yardstick())
    events = {none: ["pause", "done"], fixed: ["done"]}
    pool._arms = {
        arm: FakeProcess(arm.name, answers, [])  # type: ignore[misc]
        for arm, answers in events.items()
    }
    # Before and after each turn: none, fixed:2 (waits for two looks), none.
    machine.speeds = [0.01, 0.05, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01]

    finished = pool.run({arm: {} for arm in events}, neighbour=False)

    assert (finished[none].num_turns, finished[none].num_disturbed) == (2, 1)
    assert (finished[fixed].num_turns, finished[fixed].num_disturbed) == (1, 0)
    assert (finished[none].waited_s, finished[fixed].waited_s) == (0.0, 0.5)


def test_the_fixed_computation_takes_time_here() -> None:
    yardstick = Yardstick()

    yardstick.before_turn()
    yardstick.after_turn()

    assert len(yardstick._usual) >= 2
    assert all(0.0 < reading < MAX_WAIT_S for reading in yardstick._usual)
