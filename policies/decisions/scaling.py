"""How many replicas: the fewest whose steps are short enough for the load to come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

_LEVEL_S: Final = 10.0
_TREND_S: Final = 30.0
"""Time constants of the forecast's level and trend."""

_SLACK: Final = 0.01
"""Of a replica's capacity: no other is started for so little."""

_BEARABLE_SHARE: Final = 0.25
"""Of an empty step, by which requests may lengthen it whatever the target is."""

_DEVIATIONS: Final = 4.0
_MOST_SPARE: Final = 0.5
"""Of a load about its mean, and of the mean: for the smaller there are to be seats."""

_FIRST_START_S: Final = 60.0
_START_WEIGHT: Final = 0.5
_START_RANGE_S: Final = (1.0, 1800.0)


@dataclass(frozen=True, slots=True)
class ReplicaPace:
    """How fast a replica is.

    Attributes:
        base_ms: Of a step, whatever it holds.
        request_ms: Of each request in it, its drafts included.
        tokens_per_step: Of each request in each step, accepted drafts included; >= 1.
        num_seats: Requests it runs at a time.
    """

    base_ms: float
    request_ms: float
    tokens_per_step: float
    num_seats: int

    def capacity(self, target_token_ms: float) -> int:
        """Return the most requests that get a token in that time on average; >= 1.

        Where hardly any would, as many as lengthen an empty step by a bearable share:
        with fewer nobody would gain much, and a fleet grow without end.
        """
        room_ms = target_token_ms * self.tokens_per_step - self.base_ms
        room_ms = max(room_ms, _BEARABLE_SHARE * self.base_ms)
        if self.request_ms * self.num_seats <= room_ms:
            return self.num_seats
        return max(1, int(room_ms / self.request_ms))


class LoadForecast:
    """Follows a load and its trend, however irregularly it is told of it.

    Source: Holt, Forecasting seasonals and trends by exponentially weighted moving
    averages, 1957; without seasons, with weights by the time between two looks.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._level = self._trend = 0.0
        self._latest_s: float | None = None

    def observe(self, now_s: float, load: float) -> None:
        """Take a look; nothing comes of one from the past or of no number."""
        if not math.isfinite(load):
            return
        if self._latest_s is None:
            self._level, self._latest_s = load, now_s
            return
        passed_s = now_s - self._latest_s
        if passed_s <= 0.0:
            return
        self._latest_s = now_s
        expected = self._level + self._trend * passed_s
        level = expected + (load - expected) * -math.expm1(-passed_s / _LEVEL_S)
        slope = (level - self._level) / passed_s
        self._trend += (slope - self._trend) * -math.expm1(-passed_s / _TREND_S)
        self._level = level

    def ahead(self, lead_s: float) -> float:
        """Return the load to be ready for: now, or so many seconds from now."""
        return max(0.0, self._level, self._level + self._trend * lead_s)


class Scaling:
    """Decides how many replicas there are to be.

    Attributes:
        start_s: How long a replica takes to start, as seen.
        forecast: Of requests in engines or waiting for one.
    """

    def __init__(self, target_token_ms: float, usual_capacity: float) -> None:
        """Know nothing yet.

        Args:
            target_token_ms: Longest mean time between two tokens of a request.
            usual_capacity: Requests a replica takes while nobody's pace is known.
        """
        self.start_s = _FIRST_START_S
        self.forecast = LoadForecast()
        self._target_token_ms = target_token_ms
        self._usual_capacity = usual_capacity
        self._starting: tuple[float, int] | None = None

    def decide(
        self,
        now_s: float,
        load: float,
        paces: Collection[ReplicaPace],
        num_running: int,
        num_wanted: int,
    ) -> int:
        """Return the fewest replicas for the load to come, without any bounds.

        Args:
            now_s: Seconds, from any clock.
            load: Requests in engines or waiting for one.
            paces: Of the replicas that know theirs.
            num_running: Replicas that run.
            num_wanted: Replicas there are to be by the latest decision.
        """
        self._time_starts(now_s, num_running, num_wanted)
        self.forecast.observe(now_s, load)
        to_come = self.forecast.ahead(self.start_s)
        if not paces:
            return math.ceil(to_come / self._usual_capacity - _SLACK)
        total = sum(pace.capacity(self._target_token_ms) for pace in paces)
        seats = sum(pace.num_seats for pace in paces)
        # Requests come at random: a full house turns some away. Source: square-root
        # staffing (Halfin and Whitt, Operations Research 29, 1981).
        spare = min(_DEVIATIONS * math.sqrt(to_come), _MOST_SPARE * to_come)
        share = max(to_come / total, (to_come + spare) / seats)
        return math.ceil(share * len(paces) - _SLACK)

    def _time_starts(self, now_s: float, num_running: int, num_wanted: int) -> None:
        if self._starting is not None:
            since_s, goal = self._starting
            if num_running < goal <= num_wanted:
                return
            self._starting = None
            if num_running >= goal:
                shortest_s, longest_s = _START_RANGE_S
                took_s = min(max(now_s - since_s, shortest_s), longest_s)
                self.start_s += _START_WEIGHT * (took_s - self.start_s)
        if num_wanted > num_running:
            self._starting = now_s, num_running + 1
