"""What the scheduler counted, and who used the machine, in the steady part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

_COUNTED = (
    *("num_steps", "num_drafts", "num_proposed_tokens", "num_verified_tokens"),
    *("num_accepted_tokens", "num_selections"),
    *("selection_seconds_total", "planning_seconds_total"),
)
_COUNTED_BY_REASON = ("num_fallbacks", "num_cut_tokens")


class Counters:
    """Differences of cumulative figures between two marks."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any] | None]) -> None:
        """Count nothing yet.

        Args:
            snapshot: Returns the scheduler's figures; None from one that has none.
        """
        self._snapshot = snapshot
        self._process = psutil.Process()
        self._marks: dict[str, tuple[Any, tuple[float, float, float]]] = {}

    def mark(self, name: str) -> None:
        """Read all figures at `start` or `end`."""
        self._marks[name] = (self._snapshot(), self._read_cpu())

    def result(self) -> dict[str, Any]:
        """Return what happened between `start` and `end`.

        Returns:
            Plain values; None where nobody counted. `other_cpu_share` is the share of
            the machine's cores that other processes, and its host, used.
        """
        (first, cpu_before), (last, cpu_after) = (
            self._marks["start"],
            self._marks["end"],
        )
        spent_s, busy_s, own_s = (
            after - before for before, after in zip(cpu_before, cpu_after, strict=True)
        )
        available_s = max(1e-9, spent_s * (psutil.cpu_count() or 1))
        return {
            "counters": None
            if first is None or last is None
            else _difference(first, last),
            "other_cpu_share": max(0.0, (busy_s - own_s) / available_s),
        }

    def _read_cpu(self) -> tuple[float, float, float]:
        """Return the time, and busy seconds of the machine and of this process."""
        machine, own = psutil.cpu_times(), self._process.cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)
        return time.perf_counter(), sum(machine) - idle_s, own.user + own.system


def _difference(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: last[name] - first[name] for name in _COUNTED if name in last
    }
    for name in _COUNTED_BY_REASON:
        before = first.get(name, {})
        counts = {
            reason: count - before.get(reason, 0)
            for reason, count in last.get(name, {}).items()
        }
        values[name] = {reason: count for reason, count in counts.items() if count}
    return values
