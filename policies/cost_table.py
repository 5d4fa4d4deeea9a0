"""One part of a step's time by the count it depends on, learnt online."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.cost_fits import Drift, Trend, rescale_drift
from policies.cost_sample import (
    MAX_EXTRA_SAVING,
    Shape,
    follow_sample,
    learn_sample,
    make_monotone,
    price_extra,
)
from policies.curves import (
    draw_through,
    pad_count,
    place_points,
    price_count,
    price_counts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def make_knots(
    max_value: int, padded_sizes: tuple[int, ...] = ()
) -> NDArray[np.float64]:
    """Return table positions: every count to 16, then ever wider, up to `max_value`.

    Small counts come dense because batched decoding lives there and kernels change
    their tiling there. Where they are padded, only the padded sizes come up.
    """
    knots = list(range(1, 17))
    step = 4
    while knots[-1] < max_value:
        for _ in range(8):
            knots.append(knots[-1] + step)
        step *= 2
    clipped = {min(knot, max(1, max_value)) for knot in knots}
    if padded_sizes:
        beyond = (knot for knot in clipped if knot > padded_sizes[-1])
        clipped = {*padded_sizes, *beyond}
    return np.array(sorted(clipped), dtype=np.float64)


@dataclass(slots=True)
class CostTable:
    """Milliseconds by count (tokens or requests), monotone, learnt online.

        price = drift * trend(count) * (1 + deviation[count])
              + slope * (extra - usual extra)

    Four layers, from slow to fast, each learning what the ones before leave over:
    the start-up profile (or a prior) gives the shape; the trend bends it in level and
    per-count price, so that counts never visited follow the others; every knot has a
    deviation of its own, believed in proportion to its visits (a staircase shows here);
    drift and the slope of `extra` (context length) follow the last 10 samples. The
    slope prices deviations from the usual extra alone: what a constant context costs is
    part of the table. Linear between knots and, with the last slope, beyond them; a
    count that the engine pads is priced, and learnt from, as what it is padded to.

    Source: ours; vLLM's cost tables are profiled once and never updated.
    """

    max_count: int
    first_ms: float
    per_unit_ms: float
    padded_sizes: tuple[int, ...] = ()
    knots: NDArray[np.float64] = field(init=False)
    _sizes: NDArray[np.float64] = field(init=False)
    _xs: NDArray[np.float64] = field(init=False)
    _base_ys: NDArray[np.float64] = field(init=False)
    _value_ys: NDArray[np.float64] = field(init=False)
    _deviation: NDArray[np.float64] = field(init=False)
    _num_visits: NDArray[np.float64] = field(init=False)
    _shape: Shape = field(init=False, default=Shape())
    _trend: Trend = field(init=False)
    _drift: Drift = field(init=False)

    def __post_init__(self) -> None:
        """Lay out the knots and the prior."""
        self.knots = make_knots(self.max_count, self.padded_sizes)
        self._sizes = np.array(self.padded_sizes, dtype=np.float64)
        self._xs = place_points(self.knots)
        self._set(self.first_ms + self.per_unit_ms * (self.knots - 1.0))

    @property
    def slope_ms(self) -> float:
        """Milliseconds per unit of `extra`."""
        return self._drift.slope

    def extra_ms(self, extra: float) -> float:
        """Return what `extra` adds to the price, negative below the usual.

        Never so much below that a step would be free.
        """
        slope, usual_extra = self._drift.slope, self._shape.usual_extra
        return price_extra(slope, usual_extra, self.at(1.0), float(extra))

    def extras_ms(self, extras: NDArray[np.float64]) -> NDArray[np.float64]:
        """Do what `extra_ms` does, for many."""
        added = self._drift.slope * (extras - self._shape.usual_extra)
        return np.maximum(added, -MAX_EXTRA_SAVING * self.at(1.0))

    def predict(self, count: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return milliseconds for one or many counts; 0 where the count is <= 0."""
        counts = np.asarray(count, dtype=np.float64)
        prices = price_counts(
            self._xs, self._value_ys, self._sizes, self._drift.level, counts.ravel()
        )
        return prices.reshape(counts.shape)

    def at(self, count: float) -> float:
        """Return milliseconds for one count, as `predict` does."""
        return price_count(
            self._xs, self._value_ys, self._sizes, self._drift.level, float(count)
        )

    def fit_profile(self, counts: Sequence[int], measured_ms: Sequence[float]) -> None:
        """Replace the prior by a start-up profile.

        Between profiled counts the shape is linear; below the first it keeps the level
        and beyond the last the mean slope, which one bad timing moves least.
        """
        order = np.argsort(np.asarray(counts))
        xs = np.asarray(counts, dtype=np.float64)[order]
        ys = np.maximum.accumulate(np.asarray(measured_ms, dtype=np.float64)[order])
        if xs.size == 0:
            return
        values = np.interp(self.knots, xs, ys)
        if xs.size > 1:
            slope = max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
            beyond = self.knots > xs[-1]
            values[beyond] = ys[-1] + slope * (self.knots[beyond] - xs[-1])
        self._set(values)

    def observe(self, count: float, measured_ms: float, extra: float = 0.0) -> float:
        """Learn from one sample; non-positive counts and times are ignored.

        Args:
            count: Tokens or requests.
            measured_ms: What they took.
            extra: What the slope is multiplied with.

        Returns:
            The factor by which the price of this count moved, 1 if nothing was learnt.
        """
        if count <= 0 or not math.isfinite(measured_ms) or measured_ms <= 0.0:
            return 1.0
        self._shape, self._trend, self._drift, moved = learn_sample(
            self._shape,
            self._trend,
            self._drift,
            self._xs,
            self._base_ys,
            self._value_ys,
            self._deviation,
            self._num_visits,
            pad_count(self._sizes, float(count)),
            float(measured_ms),
            float(extra),
        )
        return moved

    def follow(self, count: float, measured_ms: float, extra: float = 0.0) -> float:
        """Learn drift alone from a sample that others had a part in.

        Args:
            count: Tokens or requests, > 0.
            measured_ms: What is believed to be this table's part.
            extra: What the slope is multiplied with.

        Returns:
            As `observe`.
        """
        if not math.isfinite(measured_ms):
            return 1.0
        level_before = self._drift.level
        self._drift = follow_sample(
            self._shape,
            self._drift,
            self.at(count) / level_before,
            self.at(1.0),
            float(measured_ms),
            float(extra),
        )
        return self._drift.level / level_before

    def rescale(self, factor: float) -> None:
        """Follow a drift that was measured elsewhere on the same device."""
        self._drift = rescale_drift(self._drift, factor)

    def export_state(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "knots": self.knots.tolist(),
            "value_ms": self.predict(self.knots).tolist(),
            "slope_ms": self.slope_ms,
            "usual_extra": self._shape.usual_extra,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from what another engine's table says of this one's knots."""
        xs = place_points(np.array(state["knots"], dtype=np.float64))
        ys = np.empty_like(xs)
        draw_through(xs, ys, np.array(state["value_ms"], dtype=np.float64))
        self._set(np.interp(self.knots, xs, ys))
        self._drift = self._drift._replace(slope=float(state["slope_ms"]))
        self._shape = self._shape._replace(usual_extra=float(state["usual_extra"]))

    def _set(self, values: NDArray[np.float64]) -> None:
        base_ms = np.maximum(values, 1e-4)
        self._deviation = np.zeros(self.knots.size)
        self._num_visits = np.zeros(self.knots.size)
        self._trend, self._drift = Trend(), Drift()
        self._base_ys, self._value_ys = np.empty_like(self._xs), np.empty_like(self._xs)
        draw_through(self._xs, self._base_ys, base_ms)
        draw_through(self._xs, self._value_ys, make_monotone(base_ms))
