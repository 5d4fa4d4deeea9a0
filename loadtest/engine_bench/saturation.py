"""Which points are saturated: more requests no longer mean more tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from .plan import Cell

SATURATED_GAIN = 1.1
"""Of the throughput of `none`, by going on to the next larger number of requests."""


def find_saturated(rows: Iterable[Mapping[str, Any]]) -> set[Cell]:
    """Return the cells from which on more requests gain `none` less than a tenth.

    The largest number of requests of a workload has no next one: it is saturated if
    the way there gained less than that, or the point before it already was.

    Args:
        rows: Of `results.json`; medians of `none` are what counts.
    """
    speeds: dict[tuple[str, float], dict[int, float]] = {}
    for row in rows:
        if row["policy"] == "none":
            load = (row["workload"], row["temperature"])
            speed = float(row["output_tokens_per_s"]["median"])
            speeds.setdefault(load, {})[row["concurrency"]] = speed
    return {
        Cell(workload, temperature, concurrency)
        for (workload, temperature), own in speeds.items()
        for concurrency in _saturated(own)
    }


def _saturated(speeds: Mapping[int, float]) -> set[int]:
    """Return what of one workload is saturated."""
    found: set[int] = set()
    for fewer, more in pairwise(sorted(speeds)):
        if fewer in found or speeds[more] < SATURATED_GAIN * speeds[fewer]:
            found |= {fewer, more}
    return found
