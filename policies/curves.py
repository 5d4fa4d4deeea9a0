"""Curves over counts, and the counts that an engine pads to."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEAR, _FAR = 1e-9, 1e9


class Curve:
    """Values at knots, linear between them and beyond the last; 0 at 0.

    One look-up in every engine step and part: two more points, at almost 0 and far
    beyond the last knot, spare it all special cases.

    Attributes:
        xs: `[num_knots + 3]`, rising from 0.
        ys: `[num_knots + 3]`.
    """

    __slots__ = ("_x_list", "_y_list", "xs", "ys")

    def __init__(self, knots: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        slope = 0.0
        if knots.size > 1:
            slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        far_ms = values[-1] + slope * (_FAR - knots[-1])
        self.xs = np.concatenate(([0.0, _NEAR], knots, [_FAR]))
        self.ys = np.concatenate(([0.0, values[0]], values, [far_ms]))
        self._x_list: list[float] = self.xs.tolist()
        self._y_list: list[float] = self.ys.tolist()

    @property
    def values(self) -> NDArray[np.float64]:
        """Values at the knots."""
        inner: NDArray[np.float64] = self.ys[2:-1]
        return inner

    def many(self, x: NDArray[np.float64] | float) -> NDArray[np.float64]:
        value: NDArray[np.float64] = np.interp(x, self.xs, self.ys)
        return value

    def one(self, x: float) -> float:
        if x <= 0:
            return 0.0
        right, share = self.locate(x)
        return self.between(right, share)

    def locate(self, x: float) -> tuple[int, float]:
        """Return where x > 0 lies: the point to its right and how near it is to it.

        All curves over the same knots have their points in the same places.
        """
        xs = self._x_list
        right = bisect_left(xs, x)
        low = xs[right - 1]
        return right, (x - low) / (xs[right] - low)

    def between(self, right: int, share: float) -> float:
        """Return the value at a place that `locate` found."""
        ys = self._y_list
        return ys[right - 1] * (1.0 - share) + ys[right] * share

    def knots_at(self, right: int, share: float) -> tuple[tuple[int, float], ...]:
        """Return the numbers of the knots around a place and how much each counts."""
        last = len(self._x_list) - 4
        if right <= 2:
            return ((0, 1.0),)
        if right > last + 2:
            return ((last, 1.0),)
        return ((right - 3, 1.0 - share), (right - 2, share))


class Stairs:
    """The counts that passes are padded to; a count past the last stays as it is.

    Attributes:
        sizes: `[num_sizes + 1]`, rising from 0: no token at all needs no pass.
    """

    __slots__ = ("_size_list", "sizes")

    def __init__(self, padded_sizes: tuple[int, ...]) -> None:
        self._size_list: list[float] = [0.0, *padded_sizes]
        self.sizes = np.array(self._size_list)

    def one(self, count: float) -> float:
        place = bisect_left(self._size_list, count)
        return self._size_list[place] if place < len(self._size_list) else count


@compiled
def price_counts(
    xs: NDArray[np.float64],
    ys: NDArray[np.float64],
    sizes: NDArray[np.float64],
    level: float,
    counts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Read a curve at many counts.

    Args:
        xs: `[num_points]`, rising from 0, as `Curve.xs`.
        ys: `[num_points]`.
        sizes: `[num_sizes]`, as `Stairs.sizes`; empty where nothing is padded.
        level: Factor on every value.
        counts: `[num_counts]`, < 1e9; what is not above 0 costs nothing.

    Returns:
        `[num_counts]`.
    """
    prices = np.zeros(counts.size)
    for index in range(counts.size):
        count = counts[index]
        if count <= 0.0:
            continue
        if sizes.size > 0 and count <= sizes[-1]:
            count = sizes[_find(sizes, count)]
        right = _find(xs, count)
        low = xs[right - 1]
        share = (count - low) / (xs[right] - low)
        prices[index] = level * (ys[right - 1] * (1.0 - share) + ys[right] * share)
    return prices


@compiled
def _find(rising: NDArray[np.float64], value: float) -> int:
    """Return the first place of something no smaller, by halves."""
    low, high = 0, rising.size - 1
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
