"""Curves over counts, linear between points, and counts that an engine pads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEAR, _FAR = 1e-9, 1e9
"""Two more points, at almost 0 and far beyond the last knot, spare every look-up all
special cases: a curve is 0 at 0, level up to the first knot, and goes on with its last
slope."""

FIRST_KNOT = 2
"""Place of the first knot among the points."""


def place_points(knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where a curve over these knots has its points, `[num_knots + 3]`."""
    return np.concatenate(([0.0, _NEAR], knots, [_FAR]))


@compiled
def draw_through(
    xs: NDArray[np.float64], ys: NDArray[np.float64], values: NDArray[np.float64]
) -> None:
    """Draw a curve through values at its knots.

    Args:
        xs: `[num_knots + 3]`, from `place_points`.
        ys: `[num_knots + 3]`, changed in place.
        values: `[num_knots]`.
    """
    last = values.size - 1
    ys[0], ys[1] = 0.0, values[0]
    for knot in range(values.size):
        ys[FIRST_KNOT + knot] = values[knot]
    slope = 0.0
    if last > 0:
        run = xs[FIRST_KNOT + last] - xs[FIRST_KNOT + last - 1]
        slope = (values[last] - values[last - 1]) / run
    ys[-1] = values[last] + slope * (_FAR - xs[FIRST_KNOT + last])


@compiled
def bisect(rising: NDArray[np.float64], value: float) -> int:
    """Return the first place of something no smaller; the last place if none is."""
    low, high = 0, rising.size - 1
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def pad_count(sizes: NDArray[np.float64], count: float) -> float:
    """Return the count that the engine makes of it.

    Args:
        sizes: `[num_sizes]`, rising; empty where nothing is padded.
        count: > 0. Past the last size it stays as it is.
    """
    if sizes.size == 0 or count > sizes[-1]:
        return count
    padded: float = sizes[bisect(sizes, count)]
    return padded


@compiled
def locate(xs: NDArray[np.float64], x: float) -> tuple[int, float]:
    """Return where 0 < x < 1e9 lies: the point to its right, and how near it is."""
    right = bisect(xs, x)
    low = xs[right - 1]
    return right, (x - low) / (xs[right] - low)


@compiled
def interpolate(ys: NDArray[np.float64], right: int, share: float) -> float:
    """Return a curve's value at a place that `locate` found."""
    value: float = ys[right - 1] * (1.0 - share) + ys[right] * share
    return value


@compiled
def cost_at(
    xs: NDArray[np.float64],
    ys: NDArray[np.float64],
    sizes: NDArray[np.float64],
    level: float,
    count: float,
) -> float:
    """Read a curve at one count, as `costs_at` does."""
    if count <= 0.0:
        return 0.0
    right, share = locate(xs, pad_count(sizes, count))
    return level * interpolate(ys, right, share)


@compiled
def costs_from(
    costs_ms: NDArray[np.float64],
    xs: NDArray[np.float64],
    ys: NDArray[np.float64],
    sizes: NDArray[np.float64],
    level: float,
    first: int,
) -> None:
    """Add a curve's values at `first`, `first + 1`, ... to `costs_ms`, in place."""
    for index in range(costs_ms.size):
        costs_ms[index] += cost_at(xs, ys, sizes, level, float(first + index))


@compiled
def costs_at(
    xs: NDArray[np.float64],
    ys: NDArray[np.float64],
    sizes: NDArray[np.float64],
    level: float,
    counts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Read a curve at many counts.

    Args:
        xs: `[num_points]`, from `place_points`.
        ys: `[num_points]`, from `draw_through`.
        sizes: `[num_sizes]`, rising, to which counts are padded; empty for none.
        level: Factor on every value.
        counts: `[num_counts]`, < 1e9; what is not above 0 costs nothing.

    Returns:
        `[num_counts]`.
    """
    costs_ms = np.empty(counts.size)
    for index in range(counts.size):
        costs_ms[index] = cost_at(xs, ys, sizes, level, counts[index])
    return costs_ms
