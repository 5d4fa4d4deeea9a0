"""One part of a step's time by the count it depends on, learnt online."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.cost_fits import Drift, Trend
from policies.curves import Curve, Stairs, price_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EAGER_SAMPLES = 64
REFRESH_EVERY = 8
"""Samples between two looks at the whole table, once it has settled: drift, which is
fast, needs none."""

SCATTER_RATE = 0.02
"""Share by which a sample moves the scatter around an entry's own mean."""

USUAL_RATE = 0.003
"""Share by which a sample moves the usual context, as slowly as the trend."""

MAX_EXTRA_SAVING = 0.75
"""Share of the cheapest price that less of the extra than usual can save at most: a
slope is known near the usual extra, and far below it no step is free."""

MIN_TREND = 0.02
"""Least share of the base price that the trend leaves: a line fitted to small counts
may fall below 0 at large ones, and deviations are relative to it."""

ENTRY_KEEP = 0.96
"""Per-visit memory of a table entry's own deviation, about 25 visits."""

ENTRY_PRIOR = 2.0
"""Visits that the trend counts for at least against an entry's own deviation."""

USUAL_DEVIATION = 0.03
"""Deviations that are more than chance, as a share of the price. Where samples of one
count scatter more, it takes the more visits to tell: believed too soon, whichever count
was lucky looks cheap, is chosen again and again, and confirms itself."""

OUTLIER_FACTOR = 4.0
"""A residual beyond this many typical ones moves the table as if it were this large:
a page fault or a neighbour's burst is not a new price."""


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
    _stairs: Stairs | None = field(init=False, default=None)
    _sizes: NDArray[np.float64] = field(init=False)
    _base_ms: NDArray[np.float64] = field(init=False)
    _base: Curve = field(init=False)
    _value: Curve = field(init=False)
    _deviation: list[float] = field(init=False)
    _num_visits: list[float] = field(init=False)
    _trend: Trend = field(init=False)
    _drift: Drift = field(init=False)
    _usual_extra: float = field(init=False, default=0.0)
    _num_samples: int = field(init=False, default=0)
    _typical_residual: float = field(init=False, default=0.5)
    _scatter: float = field(init=False, default=0.1)

    def __post_init__(self) -> None:
        """Lay out the knots and the prior."""
        self.knots = make_knots(self.max_count, self.padded_sizes)
        if self.padded_sizes:
            self._stairs = Stairs(self.padded_sizes)
        self._sizes = np.empty(0) if self._stairs is None else self._stairs.sizes
        self._set(self.first_ms + self.per_unit_ms * (self.knots - 1.0))

    @property
    def slope_ms(self) -> float:
        """Milliseconds per unit of `extra`."""
        return self._drift.slope

    def extra_ms(self, extra: float) -> float:
        """Return what `extra` adds to the price, negative below the usual.

        Never so much below that a step would be free.
        """
        added = self._drift.slope * (extra - self._usual_extra)
        return added if added >= 0.0 else max(added, -MAX_EXTRA_SAVING * self.at(1))

    def predict(self, count: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return milliseconds for one or many counts; 0 where the count is <= 0."""
        counts = np.asarray(count, dtype=np.float64)
        curve, level = self._value, self._drift.level
        prices = price_counts(curve.xs, curve.ys, self._sizes, level, counts.ravel())
        return prices.reshape(counts.shape)

    def at(self, count: float) -> float:
        """Return milliseconds for one count, as `predict` does but ten times faster."""
        if self._stairs is not None:
            count = self._stairs.one(count)
        return self._value.one(count) * self._drift.level

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
        if count <= 0 or not np.isfinite(measured_ms) or measured_ms <= 0.0:
            return 1.0
        if self._stairs is not None:
            count = self._stairs.one(count)
        if self._usual_extra == 0.0:
            self._usual_extra = extra
        place = self._value.locate(count)
        drift_before = self._drift.level
        value = self._value.between(*place)
        known_ms = self._limit_outlier(
            measured_ms, max(drift_before * value + self.extra_ms(extra), 1e-4)
        )
        self._drift.fit(value, known_ms, extra, self._usual_extra, self._scatter)
        plain_ms = max(known_ms - self.extra_ms(extra), 1e-4)
        self._usual_extra += USUAL_RATE * (extra - self._usual_extra)
        self._learn_shape(count, place, plain_ms)
        return self._value.between(*place) * self._drift.level / (value * drift_before)

    def follow(self, count: float, measured_ms: float, extra: float = 0.0) -> float:
        """Learn drift alone from a sample that others had a part in.

        Args:
            count: Tokens or requests, > 0.
            measured_ms: What is believed to be this table's part.
            extra: What the slope is multiplied with.

        Returns:
            As `observe`.
        """
        if not np.isfinite(measured_ms):
            return 1.0
        if self._stairs is not None:
            count = self._stairs.one(count)
        value, drift_before = self._value.one(count), self._drift.level
        predicted_ms = drift_before * value + self.extra_ms(extra)
        limit = min(OUTLIER_FACTOR * self._typical_residual, 0.9)
        relative = measured_ms / predicted_ms - 1.0
        known_ms = predicted_ms * (1.0 + min(max(relative, -limit), limit))
        self._drift.fit(value, known_ms, extra, self._usual_extra, self._scatter)
        return self._drift.level / drift_before

    def rescale(self, factor: float) -> None:
        """Follow a drift that was measured elsewhere on the same device."""
        self._drift.rescale(factor)

    def export_state(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "knots": self.knots.tolist(),
            "value_ms": (self._value.values * self._drift.level).tolist(),
            "slope_ms": self.slope_ms,
            "usual_extra": self._usual_extra,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from what another engine's table says of this one's knots."""
        knots = np.array(state["knots"], dtype=np.float64)
        values = np.array(state["value_ms"], dtype=np.float64)
        self._set(Curve(knots, values).many(self.knots))
        self._drift.slope = float(state["slope_ms"])
        self._usual_extra = float(state["usual_extra"])

    def _set(self, values: NDArray[np.float64]) -> None:
        self._base_ms = np.maximum(values, 1e-4)
        self._deviation = [0.0] * self.knots.size
        self._num_visits = [0.0] * self.knots.size
        self._trend = Trend()
        self._drift = Drift()
        self._base = Curve(self.knots, self._base_ms)
        self._value = Curve(self.knots, _make_monotone(self._base_ms))

    def _limit_outlier(self, measured_ms: float, predicted_ms: float) -> float:
        relative = measured_ms / max(predicted_ms, 1e-6) - 1.0
        limit = OUTLIER_FACTOR * self._typical_residual
        self._typical_residual += 0.05 * (
            min(abs(relative), 4.0 * limit) - self._typical_residual
        )
        self._typical_residual = max(self._typical_residual, 0.01)
        return predicted_ms * (1.0 + min(max(relative, -min(limit, 0.9)), limit))

    def _learn_shape(
        self, count: float, place: tuple[int, float], plain_ms: float
    ) -> None:
        """Bend the trend by the sample itself, entries by the sample without drift."""
        base_ms = self._base.between(*place)
        per_base = count / base_ms
        self._trend.fit(per_base, plain_ms / base_ms)
        trend = max(self._trend.predict(per_base), MIN_TREND)
        own = plain_ms / (self._drift.level * base_ms * trend) - 1.0
        deviation, num_visits = self._deviation, self._num_visits
        usual = 0.0
        for index, share in self._base.knots_at(*place):
            if num_visits[index] > 0.0:
                usual += share * deviation[index] / num_visits[index]
            keep = ENTRY_KEEP**share
            deviation[index] = keep * deviation[index] + share * own
            num_visits[index] = keep * num_visits[index] + share
        self._scatter += SCATTER_RATE * (min(abs(own - usual), 1.0) - self._scatter)
        self._num_samples += 1
        if self._num_samples < EAGER_SAMPLES or self._num_samples % REFRESH_EVERY == 0:
            self._refresh()

    def _refresh(self) -> None:
        trend = self._base_ms * self._trend.level + self._trend.slope * self.knots
        trend = np.maximum(trend, MIN_TREND * self._base_ms)
        prior = max(ENTRY_PRIOR, (self._scatter / USUAL_DEVIATION) ** 2)
        belief = np.array(self._deviation) / (np.array(self._num_visits) + prior)
        priced = _make_monotone(np.maximum(trend * (1.0 + belief), 1e-4))
        self._value = Curve(self.knots, priced)


def _make_monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a non-decreasing compromise: half what to raise, half what to lower."""
    raised = np.maximum.accumulate(values)
    lowered = np.minimum.accumulate(values[::-1])[::-1]
    middle: NDArray[np.float64] = 0.5 * (raised + lowered)
    return middle
