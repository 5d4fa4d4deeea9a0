"""How far a planner's step-time predictions were off, step by step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StepErrors:
    """Stands between scheduler and planner and compares predictions with the clock.

    A prediction is that of the planner's cost model before it has learnt from the
    step. It costs microseconds a step, which the arm pays itself.
    """

    def __init__(self, planner: Any) -> None:
        """Watch a planner that has a cost model."""
        self._planner = planner
        self._errors: list[float] = []
        self._marks: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self._planner, name)

    def observe_timing(self, timing: Any) -> None:
        """Note the relative error of the step before."""
        measured_ms = timing.total_ms
        if measured_ms > 0:
            predicted_ms = float(self._planner.cost.predict_ms(timing))
            self._errors.append(abs(predicted_ms - measured_ms) / measured_ms)
        self._planner.observe_timing(timing)

    def mark(self, name: str) -> None:
        """Note that `start` or `end` of the steady part has been reached."""
        self._marks[name] = len(self._errors)

    def median(self) -> float | None:
        """Return the median over the steady part; None without a step in it."""
        own = self._errors[self._marks.get("start", 0) : self._marks.get("end")]
        return statistics.median(own) if own else None


@contextmanager
def watch_step_errors(scheduler: Any) -> Iterator[StepErrors | None]:
    """Watch a scheduler's planner.

    Yields:
        The record; None where nothing is predicted.
    """
    planner = getattr(scheduler, "_planner", None)
    predict = getattr(getattr(planner, "cost", None), "predict_ms", None)
    if not callable(predict):
        yield None
        return
    errors = StepErrors(planner)
    scheduler._planner = errors
    try:
        yield errors
    finally:
        scheduler._planner = planner
