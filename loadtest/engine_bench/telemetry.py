"""What the scheduler counted, and who used the machine, in the steady part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

_COUNTED = (
    "num_steps",
    "num_drafts",
    "num_proposed_tokens",
    "num_verified_tokens",
    "num_accepted_tokens",
    "num_selections",
    "selection_seconds_total",
    "planning_seconds_total",
)
_COUNTED_BY_REASON = ("num_fallbacks", "num_cut_tokens")


@dataclass(frozen=True, slots=True)
class _CpuClock:
    now_s: float
    machine_busy_s: float
    own_busy_s: float

    def __sub__(self, other: _CpuClock) -> _CpuClock:
        return _CpuClock(
            self.now_s - other.now_s,
            self.machine_busy_s - other.machine_busy_s,
            self.own_busy_s - other.own_busy_s,
        )


@dataclass(frozen=True, slots=True)
class _Mark:
    counters: Mapping[str, Any] | None
    cpu: _CpuClock


class Telemetry:
    """Differences of cumulative figures between two marks."""

    def __init__(self, scheduler: Any) -> None:
        """Look at a scheduler: ours, or vLLM's own, which counts nothing."""
        self._scheduler = scheduler
        self._process = psutil.Process()
        self._marks: dict[str, _Mark] = {}
        self._paused = _CpuClock(0.0, 0.0, 0.0)

    def mark(self, name: str) -> None:
        """Read all figures at `start` or `end`."""
        self._marks[name] = _Mark(self._snapshot(), self._read_cpu())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out a time in which others use the machine."""
        before = self._read_cpu()
        yield
        self._paused = _read_cpu(self._process) - before

    def result(self) -> dict[str, Any]:
        """Return what happened between `start` and `end`.

        Returns:
            Plain values; None where nobody counted. `other_cpu_share` is the share of
            the machine's cores that other processes used.
        """
        start, end = self._marks["start"], self._marks["end"]
        return {
            "counters": _difference(start.counters, end.counters),
            "other_cpu_share": _other_share(start.cpu, end.cpu),
        }

    def _read_cpu(self) -> _CpuClock:
        return _read_cpu(self._process) - self._paused

    def _snapshot(self) -> Mapping[str, Any] | None:
        snapshot = getattr(self._scheduler, "snapshot", None)
        return dict(snapshot()) if callable(snapshot) else None


def _difference(
    start: Mapping[str, Any] | None, end: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if start is None or end is None:
        return None
    values: dict[str, Any] = {
        name: end[name] - start[name] for name in _COUNTED if name in end
    }
    for name in _COUNTED_BY_REASON:
        before = start.get(name, {})
        counts = {
            reason: count - before.get(reason, 0)
            for reason, count in end.get(name, {}).items()
        }
        values[name] = {reason: count for reason, count in counts.items() if count}
    return values


def _read_cpu(process: psutil.Process) -> _CpuClock:
    machine, own = psutil.cpu_times(), process.cpu_times()
    return _CpuClock(
        time.perf_counter(),
        sum(machine) - machine.idle - getattr(machine, "iowait", 0.0),
        own.user + own.system,
    )


def _other_share(start: _CpuClock, end: _CpuClock) -> float:
    spent = end - start
    available_s = spent.now_s * (psutil.cpu_count() or 1)
    others_s = spent.machine_busy_s - spent.own_busy_s
    return max(0.0, others_s / available_s) if available_s > 0 else 0.0
