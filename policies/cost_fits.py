"""The two online fits behind a cost table: a slow trend and a fast drift."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Trend:
    """A decayed fit of `y = level + slope * x` to samples of a clock that wanders.

    The slope rests on how samples differ from those shortly before them alone: a
    machine that is slow for a while would otherwise make dear whatever counts came up
    meanwhile. The level is the mean of all.

    Attributes:
        level: Fitted level. One sample's worth of prior says it is what it was.
        slope: Fitted slope; moves only as far as `x` varied.

    Source: ours; the slope is the within estimator of panel data.
    """

    level: float = 1.0
    slope: float = 0.0
    _weight: float = field(init=False, default=0.0)
    _x: float = field(init=False, default=0.0)
    _y: float = field(init=False, default=0.0)
    _square: float = field(init=False, default=0.0)
    _recent_weight: float = field(init=False, default=0.0)
    _recent_x: float = field(init=False, default=0.0)
    _recent_y: float = field(init=False, default=0.0)
    _xx: float = field(init=False, default=0.0)
    _xy: float = field(init=False, default=0.0)

    def predict(self, x: float) -> float:
        """Return the line's value."""
        return self.level + self.slope * x

    def fit(self, x: float, y: float) -> None:
        """Take in a sample."""
        # Plain floats: this runs several times a step, and arrays of five are slow.
        keep = TREND_KEEP
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + x
        self._y = keep * self._y + y
        self._square = keep * self._square + x * x
        self._compare(x, y)
        hold = self._square / self._weight
        if hold > 0.0:
            self.slope = (self._xy + hold * self.slope) / (self._xx + hold)
        level = self._y + self.level - self.slope * self._x
        self.level = max(level / (self._weight + 1.0), 1e-3)

    def _compare(self, x: float, y: float) -> None:
        """Take in how a sample differs from the mean of those shortly before it."""
        self._xx *= TREND_KEEP
        self._xy *= TREND_KEEP
        past = DRIFT_KEEP * self._recent_weight
        if past > 0.0:
            unusual_x = x - self._recent_x / self._recent_weight
            unusual_y = y - self._recent_y / self._recent_weight
            share = past / (past + 1.0)
            self._xx += share * unusual_x * unusual_x
            self._xy += share * unusual_x * unusual_y
        self._recent_weight = past + 1.0
        self._recent_x = DRIFT_KEEP * self._recent_x + x
        self._recent_y = DRIFT_KEEP * self._recent_y + y


@dataclass(slots=True)
class Drift:
    """What the last samples say of all prices at once, and of the extra's.

        sample = level * price + slope * extra

    The level is a mean over about 10 samples, one of which always says that nothing
    has changed. The slope moves by what is unusual about a sample in both respects: a
    change of all samples alike is the level's, whatever their extra is.

    Attributes:
        level: Factor on every price.
        slope: Milliseconds per unit of extra, >= 0.
    """

    level: float = 1.0
    slope: float = 0.0
    _rest: float = field(init=False, default=1.0)
    _weight: float = field(init=False, default=0.0)
    _ratio: float = field(init=False, default=0.0)
    _extra: float = field(init=False, default=0.0)
    _spread: float = field(init=False, default=0.0)

    def fit(
        self,
        price_ms: float,
        known_ms: float,
        extra: float,
        usual_extra: float,
        scatter: float = 0.0,
    ) -> None:
        """Take in a sample; the slope is about what `extra` is beyond the usual.

        Args:
            price_ms: By the table, before drift.
            known_ms: Measured, without outliers.
            extra: Of this sample.
            usual_extra: That the table's prices contain.
            scatter: By how much samples usually miss their price, as a share of it.
        """
        beyond = extra - usual_extra
        surprise_ms = unusual = 0.0
        if self._weight > 0.0:
            unusual = extra - self._extra / self._weight
            usual_ms = price_ms * self._ratio / self._weight
            surprise_ms = known_ms - self.slope * beyond - usual_ms
        past = DRIFT_KEEP * self._weight
        self._weight = past + 1.0
        self._extra = DRIFT_KEEP * self._extra + extra
        self._spread *= DRIFT_KEEP
        self._spread += unusual * unusual * past / self._weight
        if unusual != 0.0:
            share = max(USUAL_SPREAD, scatter / SLOPE_PACE)
            chance = LEAST_SPREAD + share * usual_extra
            hold = max(beyond * beyond, chance * chance)
            self.slope += surprise_ms * unusual / (self._spread + hold)
            self.slope = max(self.slope, 0.0)
        ratio = (known_ms - self.slope * beyond) / price_ms
        self._ratio = DRIFT_KEEP * self._ratio + ratio
        self.level = max((self._ratio + self._rest) / (self._weight + 1.0), 1e-3)
        # What `rescale` was told fades as samples speak for themselves.
        self._rest += (1.0 - DRIFT_KEEP) * (1.0 - self._rest)

    def rescale(self, factor: float) -> None:
        """Let all samples so far have been `factor` times what they were."""
        self._ratio *= factor
        self.level *= factor
        self._rest = min(max(self._rest * factor, 0.1), 10.0)
