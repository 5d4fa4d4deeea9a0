"""The loop that drives an engine, and what is measured of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtest.engine.loop import Delivery, LoopRecord, run_loop
from loadtest.engine.measurement import Counters, measure


@dataclass
class FakeEngine:
    """Emits `per_step` tokens a step; request i is `lengths[i]` tokens long."""

    lengths: Sequence[int]
    per_step: int = 1
    in_flight: dict[int, int] = field(default_factory=dict)
    num_admitted: int = 0
    seen: list[int] = field(default_factory=list)
    now_s: float = 0.0

    def add(self, index: int) -> None:
        self.num_admitted += 1
        self.in_flight[index] = self.lengths[index]

    def step(self) -> list[Delivery]:
        self.seen.append(len(self.in_flight))
        self.now_s += 0.1
        deliveries = []
        for index, left in list(self.in_flight.items()):
            count = min(left, self.per_step)
            self.in_flight[index] -= count
            finished = self.in_flight[index] == 0
            if finished:
                del self.in_flight[index]
            deliveries.append(Delivery(index, [index] * count, finished))
        return deliveries

    def run(self, concurrency: int, **options: Any) -> LoopRecord:
        given = self.add, self.step, len(self.lengths), concurrency
        return run_loop(*given, clock=lambda: self.now_s, **options)


def is_steady(record: LoopRecord, step_s: float) -> bool:
    return record.marks["start"] < step_s <= record.marks["end"]


def test_exactly_the_asked_number_of_requests_is_in_flight_while_steady():
    engine = FakeEngine([3, 5, 4, 7, 2, 6, 5, 3, 4, 5, 6, 2])
    record = engine.run(3)
    seen = zip(engine.seen, record.steps, strict=True)
    assert {count for count, (step_s, _) in seen if is_steady(record, step_s)} == {3}


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_faster_engines_are_measured_over_the_same_requests(per_step):
    record = FakeEngine([8] * 12, per_step).run(2)
    finished = [
        one.finished
        for step_s, deliveries in record.steps
        for one in deliveries
        if is_steady(record, step_s)
    ]
    assert sum(finished) == 12


@pytest.mark.parametrize("first", [[3, 3, 9, 9], [3, 5, 9, 9], [1, 1, 1, 9]])
def test_the_same_prompts_are_measured_whoever_ends_together(first):
    record = FakeEngine([*first, *[4] * 8]).run(4)
    before = {
        one.index
        for step_s, deliveries in record.steps
        for one in deliveries
        if step_s <= record.marks["start"]
    }
    assert before == {0, 1, 2, 3}


def test_requests_are_added_when_they_are_due_and_the_loop_waits_for_them():
    engine, waited_s = FakeEngine([1, 1, 1]), []

    def wait(seconds: float) -> None:
        waited_s.append(seconds)
        engine.now_s += seconds

    record = engine.run(3, due_s=[0.0, 0.05, 1.0], wait=wait)
    # The second came during the first's step; nobody is there from .2 s to 1 s.
    assert engine.seen == [1, 1, 1]
    assert waited_s == pytest.approx([0.8])
    assert [end_s for end_s, _ in record.steps] == pytest.approx([0.1, 0.2, 1.1])


def test_conditions_change_before_the_request_and_speeds_are_told_apart():
    engine, admitted = FakeEngine([4] * 12), {}

    def speed_up(name: str) -> None:
        admitted[name] = engine.num_admitted
        engine.per_step = 1 if name == "start" else 2

    record = engine.run(2, switch_at=6, on_mark=speed_up)
    assert admitted == {"start": 2, "switch": 6, "end": 12}
    assert sorted(record.marks, key=record.marks.__getitem__) == [*admitted]
    assert measure(record)["phases"] == pytest.approx({"before": 20.0, "after": 40.0})


@pytest.mark.parametrize("per_step", [1, 3])
def test_deliveries_of_several_tokens_shorten_the_time_per_token_only(per_step):
    result = measure(FakeEngine([9] * 8, per_step).run(2))
    expected: dict[str, Any] = {"acceptance_length": per_step, "itl_p50_ms": 100.0}
    expected |= {"itl_p99_ms": 100.0, "time_per_token_p50_ms": 100.0 / per_step}
    expected |= {"num_requests": 8, "num_output_tokens": 72}
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert result["phases"] is None
    speed = result["num_tokens"] / result["window_s"]
    assert speed == pytest.approx(20.0 * per_step)


def test_replies_are_told_apart_and_not_by_how_they_were_delivered():
    one, other = (
        measure(FakeEngine([8] * 6, per_step).run(2))["digests"] for per_step in (1, 4)
    )
    longer = measure(FakeEngine([8] * 5 + [9]).run(2))["digests"]
    assert one == other
    assert len(set(one)) == 6
    assert [a == b for a, b in zip(one, longer, strict=True)] == [True] * 5 + [False]


def test_counters_are_those_of_the_steady_part():
    figures: dict[str, Any] = {"num_steps": 5, "num_fallbacks": {"a": 1}}
    figures |= {"planning_seconds_total": 1.0, "planner": {"step_time_error": 0.5}}
    counters, silent = Counters(lambda: dict(figures)), Counters(lambda: None)
    for one in (counters, silent):
        one.mark()
    figures |= {"num_steps": 9, "num_fallbacks": {"a": 1, "b": 2}}
    figures |= {"planning_seconds_total": 1.25, "planner": {"step_time_error": 0.1}}
    for one in (counters, silent):
        one.mark()
    figures |= {"num_steps": 99}

    found = counters.result()
    assert found["counters"] == {
        "num_steps": 4,
        "num_fallbacks": {"b": 2},
        "planning_seconds_total": 0.25,
    }
    assert (found["step_time_error"], found["calibration_error"]) == (0.1, None)
    assert 0.0 <= found["other_cpu_share"] <= 1.0
    found = silent.result()
    assert found["counters"] is found["step_time_error"] is None
