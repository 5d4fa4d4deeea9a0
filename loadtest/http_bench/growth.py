"""Does it grow? A line through what a soak run measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.engine_bench.comparison import t_975

_NUM_BLOCKS = 12
"""Neighbouring samples depend on each other, means of long blocks hardly."""

_SETTLING_PART = 0.25
"""Left out at first: caches and pools fill."""

MEASURES = ("memory_mib", "num_fds", "num_threads")
_NUM_PROCESSES = "num_processes"
_SMALLEST_GROWTH = {
    "memory_mib": 16.0,
    "num_fds": 8.0,
    "num_threads": 4.0,
    _NUM_PROCESSES: 2.0,
}
_TOLERATED_SHARE_PER_HOUR = 0.05


@dataclass(frozen=True, slots=True)
class Growth:
    """A line fitted to one measure of one role.

    Attributes:
        role: Of the processes.
        measure: What was measured.
        mean: Over the fitted part.
        per_hour: Slope.
        per_hour_low: Lower end of its 95 % interval.
        hours: Length of the fitted part.
        fails: Whether it grows for certain, and by more than noise is worth.
    """

    role: str
    measure: str
    mean: float
    per_hour: float
    per_hour_low: float
    hours: float
    fails: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def fit_all(samples: Sequence[Mapping[str, Any]]) -> list[Growth]:
    """Fit every measure of every role that has enough samples.

    Of a role whose processes came or went, the longest time with the same number of
    them counts, for a second replica is no leak; their number itself is fitted over
    the whole time, for ever more of them are one.
    """
    fits = []
    for role in sorted({sample["role"] for sample in samples}):
        own = [sample for sample in samples if sample["role"] == role]
        steady = _find_longest_steady(own)
        fits.append(fit_growth(role, _NUM_PROCESSES, _points(own, _NUM_PROCESSES)))
        fits += [fit_growth(role, m, _points(steady, m)) for m in MEASURES]
    return [fit for fit in fits if fit is not None]


def _points(
    samples: Sequence[Mapping[str, Any]], measure: str
) -> list[tuple[float, float]]:
    return [(sample["epoch_s"], sample[measure]) for sample in samples]


def _find_longest_steady(
    samples: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    stretches = itertools.groupby(samples, key=lambda one: one["num_processes"])
    return max((list(stretch) for _, stretch in stretches), key=len, default=[])


def fit_growth(
    role: str, measure: str, points: Sequence[tuple[float, float]]
) -> Growth | None:
    """Fit a line to block means.

    Args:
        role: For the result.
        measure: One of `MEASURES`, or the number of processes.
        points: Time in seconds and value, by time.

    Returns:
        The fit; None with too few points for blocks of at least two.
    """
    settled = points[int(len(points) * _SETTLING_PART) :]
    if len(settled) < 2 * _NUM_BLOCKS:
        return None
    size = len(settled) / _NUM_BLOCKS
    blocks = [
        settled[round(n * size) : round((n + 1) * size)] for n in range(_NUM_BLOCKS)
    ]
    hours = [statistics.fmean(t for t, _ in block) / 3600 for block in blocks]
    values = [statistics.fmean(v for _, v in block) for block in blocks]
    slope, intercept = statistics.linear_regression(hours, values)
    middle = statistics.fmean(hours)
    spread = sum((hour - middle) ** 2 for hour in hours)
    residual = sum(
        (value - intercept - slope * hour) ** 2
        for hour, value in zip(hours, values, strict=True)
    )
    error = math.sqrt(residual / (_NUM_BLOCKS - 2) / spread)
    low = slope - t_975(_NUM_BLOCKS - 2) * error
    length = (settled[-1][0] - settled[0][0]) / 3600
    mean = statistics.fmean(values)
    return Growth(
        role=role,
        measure=measure,
        mean=mean,
        per_hour=slope,
        per_hour_low=low,
        hours=length,
        fails=low > _TOLERATED_SHARE_PER_HOUR * mean
        and slope * length > _SMALLEST_GROWTH[measure],
    )


def find_leftovers(timeline: Sequence[Mapping[str, float]]) -> list[str]:
    """Return what an idle engine still holds at the end: requests, cache blocks."""
    known = [point for point in timeline if "num_running" in point]
    if not known or known[-1] is not timeline[-1]:
        return ["the server's metrics do not tell what an idle engine holds"]
    last, first = known[-1], known[0]
    found = []
    for key in ("num_running", "num_waiting"):
        if last.get(key, 0) > 0:
            found.append(f"{key} is {last[key]:g} though no request is left")
    usage, before = last.get("kv_cache_usage", 0.0), first.get("kv_cache_usage", 0.0)
    if usage > before + 0.005:
        found.append(f"KV cache in use rose from {before:.1%} to {usage:.1%}")
    return found
