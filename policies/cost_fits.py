"""The two online fits behind a cost table: a slow trend and a fast drift.

Values and functions rather than objects with methods: that is what can be compiled.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.compiled import compiled

LEAST_SPREAD = 64.0
USUAL_SPREAD = 0.05
"""Variation of the extra, in units and as a share of the usual, that tells its price no
better than chance does, on the quietest clock."""

SLOPE_PACE = 0.1
"""What the usual extra may come to cost in a step, as a share of the price. Where
samples scatter more, the extra must vary the more to tell its price: a slope fitted to
noise makes drift, and with it every count, cheap or dear."""

TREND_KEEP = 0.997
"""Per-sample memory of the trend, about 300 samples."""

DRIFT_KEEP = 0.9
"""Per-sample memory of drift and of what was usual lately, about 10 samples: a stolen
core or a throttled clock changes the price of every count at once, most of them
unvisited."""


class Trend(NamedTuple):
    """A decayed fit of `y = level + slope * x` to samples of a clock that wanders.

    The slope rests on how samples differ from those shortly before them alone: a
    machine that is slow for a while would otherwise make dear whatever counts came up
    meanwhile. The level is the mean of all.

    Attributes:
        level: Fitted level. One sample's worth of prior says it is what it was.
        slope: Fitted slope; moves only as far as `x` varied.
        weight: Samples, decayed; the sums that follow are decayed likewise.
        x: Sum of x.
        y: Sum of y.
        square: Sum of x squared.
        recent_weight: Samples shortly before; the next two are their sums.
        recent_x: Sum of x.
        recent_y: Sum of y.
        xx: Sum of squared differences from the mean of those shortly before.
        xy: The same between x and y.

    Source: ours; the slope is the within estimator of panel data.
    """

    level: float = 1.0
    slope: float = 0.0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    square: float = 0.0
    recent_weight: float = 0.0
    recent_x: float = 0.0
    recent_y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


@compiled
def fit_trend(trend: Trend, x: float, y: float) -> Trend:
    """Return the trend with one more sample."""
    weight = TREND_KEEP * trend.weight + 1.0
    sum_x = TREND_KEEP * trend.x + x
    sum_y = TREND_KEEP * trend.y + y
    square = TREND_KEEP * trend.square + x * x
    # How the sample differs from the mean of those shortly before it.
    xx, xy = TREND_KEEP * trend.xx, TREND_KEEP * trend.xy
    past = DRIFT_KEEP * trend.recent_weight
    if past > 0.0:
        unusual_x = x - trend.recent_x / trend.recent_weight
        unusual_y = y - trend.recent_y / trend.recent_weight
        share = past / (past + 1.0)
        xx += share * unusual_x * unusual_x
        xy += share * unusual_x * unusual_y
    slope = trend.slope
    hold = square / weight
    if hold > 0.0:
        slope = (xy + hold * slope) / (xx + hold)
    level = (sum_y + trend.level - slope * sum_x) / (weight + 1.0)
    return Trend(
        max(level, 1e-3),
        slope,
        weight,
        sum_x,
        sum_y,
        square,
        past + 1.0,
        DRIFT_KEEP * trend.recent_x + x,
        DRIFT_KEEP * trend.recent_y + y,
        xx,
        xy,
    )


class Drift(NamedTuple):
    """What the last samples say of all prices at once, and of the extra's.

        sample = level * price + slope * extra

    The level is a mean over about 10 samples, one of which always says that nothing
    has changed. The slope moves by what is unusual about a sample in both respects: a
    change of all samples alike is the level's, whatever their extra is.

    Attributes:
        level: Factor on every price.
        slope: Milliseconds per unit of extra, >= 0.
        rest: What the sample says that nothing has changed; moved by `rescale_drift`.
        weight: Samples, decayed; the sums that follow are decayed likewise.
        ratio: Sum of what samples took over their price.
        extra: Sum of their extra.
        spread: How much it varied.
    """

    level: float = 1.0
    slope: float = 0.0
    rest: float = 1.0
    weight: float = 0.0
    ratio: float = 0.0
    extra: float = 0.0
    spread: float = 0.0


@compiled
def fit_drift(
    drift: Drift,
    price_ms: float,
    known_ms: float,
    extra: float,
    usual_extra: float,
    scatter: float,
) -> Drift:
    """Return the drift with one more sample; the slope is about the unusual extra.

    Args:
        drift: Before the sample.
        price_ms: By the table, before drift.
        known_ms: Measured, without outliers.
        extra: Of this sample.
        usual_extra: That the table's prices contain.
        scatter: By how much samples usually miss their price, as a share of it.
    """
    beyond = extra - usual_extra
    surprise_ms = unusual = 0.0
    if drift.weight > 0.0:
        unusual = extra - drift.extra / drift.weight
        usual_ms = price_ms * drift.ratio / drift.weight
        surprise_ms = known_ms - drift.slope * beyond - usual_ms
    past = DRIFT_KEEP * drift.weight
    weight = past + 1.0
    spread = DRIFT_KEEP * drift.spread + unusual * unusual * past / weight
    slope = drift.slope
    if unusual != 0.0:
        share = max(USUAL_SPREAD, scatter / SLOPE_PACE)
        chance = LEAST_SPREAD + share * usual_extra
        hold = max(beyond * beyond, chance * chance)
        slope = max(slope + surprise_ms * unusual / (spread + hold), 0.0)
    ratio = DRIFT_KEEP * drift.ratio + (known_ms - slope * beyond) / price_ms
    level = max((ratio + drift.rest) / (weight + 1.0), 1e-3)
    # What `rescale_drift` was told fades as samples speak for themselves.
    rest = drift.rest + (1.0 - DRIFT_KEEP) * (1.0 - drift.rest)
    extra_sum = DRIFT_KEEP * drift.extra + extra
    return Drift(level, slope, rest, weight, ratio, extra_sum, spread)


def rescale_drift(drift: Drift, factor: float) -> Drift:
    """Return the drift as if all samples so far had been `factor` times what they were.

    Args:
        drift: Before.
        factor: > 0.
    """
    return drift._replace(
        level=drift.level * factor,
        ratio=drift.ratio * factor,
        rest=min(max(drift.rest * factor, 0.1), 10.0),
    )
