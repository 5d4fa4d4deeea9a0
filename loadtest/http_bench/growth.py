"""Does it grow? A line through what a soak run measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.engine_bench.comparison import t_975

from .processes import PASSING_ROLES

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
        measure: What was measured.
        mean: Over the fitted part.
        per_hour: Slope.
        per_hour_low: Lower end of its 95 % interval.
        per_hour_high: Upper end.
        hours: Length of the fitted part.
    """

    measure: str
    mean: float
    per_hour: float
    per_hour_low: float
    per_hour_high: float
    hours: float

    @property
    def tolerated_per_hour(self) -> float:
        """What may be a cache or noise: a share of the mean, and some in any case."""
        smallest = _SMALLEST_GROWTH[self.measure] / self.hours
        return max(_TOLERATED_SHARE_PER_HOUR * self.mean, smallest)

    @property
    def is_certain(self) -> bool:
        """Whether it grows for certain, and by more than is tolerated."""
        return self.per_hour_low > self.tolerated_per_hour

    @property
    def is_excluded(self) -> bool:
        """Whether for certain it does not grow by more than is tolerated.

        Neither is known when the interval is too wide: a longer run narrows it.
        """
        return self.per_hour_high <= self.tolerated_per_hour


def fit_all(
    samples: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], Growth | None]:
    """Fit every measure of every role.

    The longest time with the same processes counts, for neither a second replica nor
    a new engine in the place of a dead one is a leak; their number itself is fitted
    over the whole time, for ever more of them are one.

    Args:
        samples: As `ProcessSampler` takes them.

    Returns:
        By role and measure; None where that time has too few samples. Roles whose
        processes come and go by nature are left out there.
    """
    fits: dict[tuple[str, str], Growth | None] = {}
    times = sorted({sample["epoch_s"] for sample in samples})
    for role in sorted({sample["role"] for sample in samples}):
        own = [sample for sample in samples if sample["role"] == role]
        counts = {sample["epoch_s"]: sample[_NUM_PROCESSES] for sample in own}
        points = [(time_s, counts.get(time_s, 0.0)) for time_s in times]
        fits[role, _NUM_PROCESSES] = fit_growth(_NUM_PROCESSES, points)
        steady = _find_longest_steady(own)
        for measure in MEASURES:
            points = [(sample["epoch_s"], sample[measure]) for sample in steady]
            fit = fit_growth(measure, points)
            if fit is not None or role not in PASSING_ROLES:
                fits[role, measure] = fit
    return fits


def _find_longest_steady(
    samples: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    stretches = itertools.groupby(samples, key=lambda one: one["pids"])
    return max((list(stretch) for _, stretch in stretches), key=len, default=[])


def fit_growth(measure: str, points: Sequence[tuple[float, float]]) -> Growth | None:
    """Fit a line to block means.

    Args:
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
    half = t_975(_NUM_BLOCKS - 2) * error
    return Growth(
        measure=measure,
        mean=statistics.fmean(values),
        per_hour=slope,
        per_hour_low=slope - half,
        per_hour_high=slope + half,
        hours=(settled[-1][0] - settled[0][0]) / 3600,
    )


def find_leftovers(timeline: Sequence[Mapping[str, float]]) -> list[str]:
    """Return what an idle engine holds at the end and did not hold at the begin."""
    if not timeline or "num_running" not in timeline[-1]:
        return ["the server's metrics do not tell what an idle engine holds"]
    last, first = timeline[-1], timeline[0]
    found = []
    for key in ("num_running", "num_waiting"):
        if last.get(key, 0) > 0:
            found.append(f"{key} is {last[key]:g} though no request is left")
    usage, before = last.get("kv_cache_usage", 0.0), first.get("kv_cache_usage", 0.0)
    if usage > before:
        found.append(f"KV cache in use rose from {before:.2%} to {usage:.2%}")
    return found
