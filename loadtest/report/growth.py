"""Does it grow? A line through what a soak run measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

_NUM_BLOCKS = 12
"""Neighbouring samples depend on each other, means of long blocks hardly."""

_SETTLING_PART = 0.25
"""Left out at first: caches and pools fill."""

_NUM_PROCESSES = "num_processes"
_SMALLEST_GROWTH = {
    "memory_mib": 16.0,
    "num_fds": 8.0,
    "num_threads": 4.0,
    _NUM_PROCESSES: 2.0,
}
MEASURES = tuple(_SMALLEST_GROWTH)[:3]
_TOLERATED_SHARE_PER_HOUR = 0.05
_PASSING_ROLES = ("idle Ray worker",)
"""Ray starts and ends them as it likes."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A line fitted to one measure of one role, with its slope's 95 % interval.

    What is tolerated may be a cache or noise: a share of the mean, and always some.
    """

    mean: float
    per_hour: float
    per_hour_low: float
    per_hour_high: float
    hours: float
    tolerated_per_hour: float

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
    over the whole time, for ever more of them are one. There is no fit (None) where
    that time has too few samples; roles whose processes come and go by nature are left
    out there.
    """
    fits: dict[tuple[str, str], Growth | None] = {}
    if not samples:
        return fits
    table = pd.DataFrame(samples)
    times = sorted(table["epoch_s"].unique())
    for role, own in table.groupby("role"):
        counts = own.set_index("epoch_s")[_NUM_PROCESSES].reindex(times, fill_value=0)
        fits[role, _NUM_PROCESSES] = fit_growth(_NUM_PROCESSES, [*counts.items()])
        pids = own["pids"].map(tuple)
        stretches = own.groupby((pids != pids.shift()).cumsum())
        steady = max((stretch for _, stretch in stretches), key=len)
        for measure in MEASURES:
            fit = fit_growth(measure, steady[["epoch_s", measure]].to_numpy(float))
            if fit is not None or role not in _PASSING_ROLES:
                fits[role, measure] = fit
    return fits


def fit_growth(measure: str, points: Any) -> Growth | None:
    """Fit a line to block means of points: Theil and Sen's median slope.

    Args:
        measure: What grows; says what is tolerated.
        points: `[num_points, 2]`, seconds and values, in order.

    Returns None with too few points for blocks of at least two.
    """
    settled = np.asarray(points[int(len(points) * _SETTLING_PART) :])
    if len(settled) < 2 * _NUM_BLOCKS:
        return None
    blocks = [block.mean(axis=0) for block in np.array_split(settled, _NUM_BLOCKS)]
    times_s, values = np.transpose(blocks)
    fit = stats.theilslopes(values, times_s / 3600, 0.95)
    mean, hours = float(values.mean()), float(np.ptp(settled[:, 0])) / 3600
    slope, _, low, high = map(float, fit)
    tolerated = _TOLERATED_SHARE_PER_HOUR * mean, _SMALLEST_GROWTH[measure] / hours
    return Growth(mean, slope, low, high, hours, max(tolerated))


def find_leftovers(timeline: Sequence[Mapping[str, float]]) -> list[str]:
    """Return what an idle engine holds at the end and did not hold at the begin."""
    if not timeline or "num_running" not in timeline[-1]:
        return ["the server's metrics do not tell what an idle engine holds"]
    last, first = timeline[-1], timeline[0]
    found = [
        f"{key} is {last[key]:g} though no request is left"
        for key in ("num_running", "num_waiting")
        if last.get(key, 0) > 0
    ]
    usage, before = (one.get("kv_cache_usage", 0.0) for one in (last, first))
    if usage > before:
        found.append(f"KV cache in use rose from {before:.2%} to {usage:.2%}")
    return found
