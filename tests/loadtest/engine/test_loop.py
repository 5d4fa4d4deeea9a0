"""The closed loop, and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtest.engine.closed_loop import Delivery, run_closed_loop
from loadtest.engine.counters import Counters
from loadtest.engine.measurement import measure


@dataclass
class FakeEngine:
    """Emits `per_step` tokens a step; request i is `lengths[i]` tokens long."""

    lengths: Sequence[int]
    per_step: int = 1
    in_flight: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    now_s: float = 0.0

    def add(self, index: int) -> None:
        self.admitted.append(index)
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


def run_fake(engine: FakeEngine, concurrency: int, **options: Any) -> Any:
    options.setdefault("on_mark", lambda name: None)
    return run_closed_loop(
        engine,
        len(engine.lengths),
        concurrency,
        clock=lambda: engine.now_s,
        **options,
    )


def test_exactly_the_asked_number_of_requests_is_in_flight_while_steady() -> None:
    engine = FakeEngine(lengths=[3, 5, 4, 7, 2, 6, 5, 3, 4, 5, 6, 2])

    record = run_fake(engine, 3)

    steady = [
        count
        for count, step in zip(engine.seen, record.steps, strict=True)
        if record.start_s < step.end_s <= record.end_s
    ]
    assert steady
    assert set(steady) == {3}


def test_faster_engines_are_measured_over_the_same_requests() -> None:
    lengths = [8] * 12
    finished = []
    for per_step in (1, 2, 4):
        record = run_fake(FakeEngine(lengths, per_step), 2)
        finished.append(
            sum(
                delivery.finished
                for step in record.steps
                if record.start_s < step.end_s <= record.end_s
                for delivery in step.deliveries
            )
        )

    assert finished == [12, 12, 12]


def test_the_same_prompts_are_measured_whoever_ends_together() -> None:
    """Two requests that end in the same step are replaced in one step, too."""
    prompts = []
    for first in ([3, 3, 9, 9], [3, 5, 9, 9], [1, 1, 1, 9]):
        record = run_fake(FakeEngine([*first, *[4] * 8]), 4)
        before = {
            delivery.index
            for step in record.steps
            if step.end_s <= record.start_s
            for delivery in step.deliveries
        }
        prompts.append(sorted(before))
    assert prompts == [[0, 1, 2, 3]] * 3


def test_conditions_change_before_the_request_is_admitted() -> None:
    engine = FakeEngine(lengths=[2] * 8)
    admitted: dict[str, int] = {}

    record = run_fake(
        engine,
        2,
        switch_at=4,
        on_mark=lambda name: admitted.update({name: len(engine.admitted)}),
    )

    assert admitted == {"start": 2, "switch": 4, "end": 8}
    assert record.start_s < record.switch_s < record.end_s


def test_too_few_requests_for_a_steady_part_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 12"):
        run_fake(FakeEngine(lengths=[3] * 11), 4)


def test_without_speculation_the_acceptance_length_is_one() -> None:
    result = measure(run_fake(FakeEngine(lengths=[5] * 8), 2))

    assert result["acceptance_length"] == 1.0
    assert result["itl_p50_ms"] == pytest.approx(100.0)
    assert result["time_per_token_p50_ms"] == pytest.approx(100.0)
    assert result["output_tokens_per_s"] == pytest.approx(20.0)


def test_deliveries_of_several_tokens_shorten_the_time_per_token_only() -> None:
    result = measure(run_fake(FakeEngine(lengths=[9] * 8, per_step=3), 2))

    assert result["acceptance_length"] == 3.0
    assert result["itl_p50_ms"] == pytest.approx(100.0)
    assert result["time_per_token_p50_ms"] == pytest.approx(100.0 / 3)


def test_throughput_before_and_after_the_change_is_told_apart() -> None:
    engine = FakeEngine(lengths=[4] * 12)

    def slow_down(name: str) -> None:
        if name == "switch":
            engine.per_step = 2

    record = run_fake(engine, 2, switch_at=6, on_mark=slow_down)

    assert measure(record)["phases"] == pytest.approx({"before": 20.0, "after": 40.0})


def test_counters_are_those_of_the_steady_part() -> None:
    figures: dict[str, Any] = {"num_steps": 5, "num_fallbacks": {"a": 1}}
    figures["planning_seconds_total"] = 1.0
    counters = Counters(lambda: dict(figures))
    counters.mark("start")
    figures |= {"num_steps": 9, "num_fallbacks": {"a": 1, "b": 2}}
    figures["planning_seconds_total"] = 1.25
    counters.mark("end")
    figures |= {"num_steps": 99}

    found = counters.result()["counters"]

    assert found["num_steps"] == 4
    assert found["num_fallbacks"] == {"b": 2}
    assert found["planning_seconds_total"] == 0.25


def test_a_scheduler_that_counts_nothing_yields_no_counters() -> None:
    counters = Counters(lambda: None)
    counters.mark("start")
    counters.mark("end")

    assert counters.result()["counters"] is None
