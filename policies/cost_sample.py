"""How one sample moves a cost table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from policies.compiled import compiled
from policies.cost_fits import Drift, Trend, fit_drift, fit_trend
from policies.curves import FIRST_KNOT, draw_through, locate, read_between

if TYPE_CHECKING:
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


class Shape(NamedTuple):
    """What a table knows beside its curves.

    Attributes:
        usual_extra: That the prices contain.
        num_samples: Learnt so far.
        typical_residual: By which share of the price a sample usually misses it.
        scatter: By which share samples of one count scatter around their own mean.
    """

    usual_extra: float = 0.0
    num_samples: int = 0
    typical_residual: float = 0.5
    scatter: float = 0.1


@compiled
def price_extra(
    slope: float, usual_extra: float, first_ms: float, extra: float
) -> float:
    """Do what `CostTable.extra_ms` does; `first_ms` is the price of a count of 1."""
    return max(slope * (extra - usual_extra), -MAX_EXTRA_SAVING * first_ms)


@compiled
def learn_sample(
    shape: Shape,
    trend: Trend,
    drift: Drift,
    xs: NDArray[np.float64],
    base_ys: NDArray[np.float64],
    value_ys: NDArray[np.float64],
    deviation: NDArray[np.float64],
    num_visits: NDArray[np.float64],
    count: float,
    measured_ms: float,
    extra: float,
) -> tuple[Shape, Trend, Drift, float]:
    """Learn from one sample; the last three arrays change in place.

    Args:
        shape: Of the table.
        trend: Of the table.
        drift: Of the table.
        xs: `[num_knots + 3]`, the points of both curves.
        base_ys: `[num_knots + 3]`, the start-up profile.
        value_ys: `[num_knots + 3]`, prices before drift.
        deviation: `[num_knots]`, decayed sums of what samples say beyond the trend.
        num_visits: `[num_knots]`, decayed.
        count: Tokens or requests, > 0, as padded.
        measured_ms: What they took, > 0.
        extra: Of the step.

    Returns:
        The first three anew, and the factor by which the price of this count moved.
    """
    usual_extra = shape.usual_extra
    if usual_extra == 0.0:
        usual_extra = extra
    first_ms = read_between(value_ys, *locate(xs, 1.0))
    right, share = locate(xs, count)
    value, level_before = read_between(value_ys, right, share), drift.level
    predicted_ms = level_before * value
    predicted_ms += price_extra(
        drift.slope, usual_extra, level_before * first_ms, extra
    )
    known_ms, typical_residual = _limit_outlier(
        measured_ms, max(predicted_ms, 1e-4), shape.typical_residual
    )
    drift = fit_drift(drift, value, known_ms, extra, usual_extra, shape.scatter)
    extra_ms = price_extra(drift.slope, usual_extra, drift.level * first_ms, extra)
    plain_ms = max(known_ms - extra_ms, 1e-4)
    usual_extra += USUAL_RATE * (extra - usual_extra)
    # The trend is bent by the sample itself, entries by the sample without drift.
    base_ms = read_between(base_ys, right, share)
    per_base = count / base_ms
    trend = fit_trend(trend, per_base, plain_ms / base_ms)
    trend_ms = base_ms * max(trend.level + trend.slope * per_base, MIN_TREND)
    own = plain_ms / (drift.level * trend_ms) - 1.0
    usual = _visit(deviation, num_visits, right, share, own)
    scatter = shape.scatter
    scatter += SCATTER_RATE * (min(abs(own - usual), 1.0) - scatter)
    num_samples = shape.num_samples + 1
    if num_samples < EAGER_SAMPLES or num_samples % REFRESH_EVERY == 0:
        _refresh(trend, scatter, xs, base_ys, value_ys, deviation, num_visits)
    moved = read_between(value_ys, right, share) * drift.level / (value * level_before)
    return (
        Shape(usual_extra, num_samples, typical_residual, scatter),
        trend,
        drift,
        moved,
    )


@compiled
def follow_sample(
    shape: Shape, drift: Drift, value: float, first_ms: float, ms: float, extra: float
) -> Drift:
    """Learn drift alone from a sample that others had a part in.

    Args:
        shape: Of the table.
        drift: Of the table.
        value: Price of the sample's count before drift.
        first_ms: Price of a count of 1, with drift.
        ms: What is believed to be this table's part.
        extra: Of the step.
    """
    predicted_ms = drift.level * value
    predicted_ms += price_extra(drift.slope, shape.usual_extra, first_ms, extra)
    limit = min(OUTLIER_FACTOR * shape.typical_residual, 0.9)
    relative = ms / predicted_ms - 1.0
    known_ms = predicted_ms * (1.0 + min(max(relative, -limit), limit))
    return fit_drift(drift, value, known_ms, extra, shape.usual_extra, shape.scatter)


@compiled
def make_monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a non-decreasing compromise: half what to raise, half what to lower."""
    middle = np.empty(values.size)
    highest = -np.inf
    for index in range(values.size):
        highest = max(highest, values[index])
        middle[index] = highest
    lowest = np.inf
    for index in range(values.size - 1, -1, -1):
        lowest = min(lowest, values[index])
        middle[index] = 0.5 * (middle[index] + lowest)
    return middle


@compiled
def _limit_outlier(
    measured_ms: float, predicted_ms: float, typical_residual: float
) -> tuple[float, float]:
    """Return a sample no further off than is likely, and the residual now typical."""
    relative = measured_ms / max(predicted_ms, 1e-6) - 1.0
    limit = OUTLIER_FACTOR * typical_residual
    known_ms = predicted_ms * (1.0 + min(max(relative, -min(limit, 0.9)), limit))
    typical_residual += 0.05 * (min(abs(relative), 4.0 * limit) - typical_residual)
    return known_ms, max(typical_residual, 0.01)


@compiled
def _visit(
    deviation: NDArray[np.float64],
    num_visits: NDArray[np.float64],
    right: int,
    share: float,
    own: float,
) -> float:
    """Enter a sample at the knots around it; return what was usual there before."""
    usual = 0.0
    right = max(right, FIRST_KNOT)
    for place in range(2):
        counts_for = share if place == 1 else 1.0 - share
        knot = right - FIRST_KNOT - 1 + place
        if knot < 0 or knot >= deviation.size:
            # Before the first knot and after the last there is but one.
            continue
        if right == FIRST_KNOT or right >= deviation.size + FIRST_KNOT:
            counts_for = 1.0
        if num_visits[knot] > 0.0:
            usual += counts_for * deviation[knot] / num_visits[knot]
        keep = ENTRY_KEEP**counts_for
        deviation[knot] = keep * deviation[knot] + counts_for * own
        num_visits[knot] = keep * num_visits[knot] + counts_for
    return usual


@compiled
def _refresh(
    trend: Trend,
    scatter: float,
    xs: NDArray[np.float64],
    base_ys: NDArray[np.float64],
    value_ys: NDArray[np.float64],
    deviation: NDArray[np.float64],
    num_visits: NDArray[np.float64],
) -> None:
    """Put the layers together again."""
    prior = max(ENTRY_PRIOR, (scatter / USUAL_DEVIATION) ** 2)
    priced = np.empty(deviation.size)
    for knot in range(deviation.size):
        base_ms = base_ys[FIRST_KNOT + knot]
        trend_ms = base_ms * trend.level + trend.slope * xs[FIRST_KNOT + knot]
        belief = deviation[knot] / (num_visits[knot] + prior)
        trend_ms = max(trend_ms, MIN_TREND * base_ms)
        priced[knot] = max(trend_ms * (1.0 + belief), 1e-4)
    draw_through(xs, value_ys, make_monotone(priced))
