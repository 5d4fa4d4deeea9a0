"""One part of a step's time by the count it depends on, learnt online."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.estimators.cost_filter import (
    CONSTANT,
    CONTEXT_STD,
    LEAST_MS,
    LEVEL_PROCESS_NOISE,
    LEVEL_STD,
    MOST_CHANGE,
    MOST_MS,
    SLOPE,
    NoiseState,
    initial_covariance,
    learn_sample,
)
from policies.estimators.curves import (
    FIRST_KNOT,
    cost_at,
    costs_at,
    costs_from,
    draw_through,
    pad_count,
    place_points,
)
from policies.estimators.monotone import apply_deviations
from policies.estimators.state import read_array, read_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


MOST_COUNT = 1e8
"""Of tokens or requests, far beyond any step's."""


def make_knots(max_value: int) -> NDArray[np.float64]:
    """Return counts with a deviation of their own, up to `max_value`.

    Small counts come dense because batched decoding lives there and kernels change
    their tiling there: every one to 16, then four, past 64 two, to a doubling.
    """
    knots = [*range(1, 17), *range(20, 33, 4), *range(40, 65, 8)]
    while knots[-1] < max_value:
        knots += [knots[-1] * 3 // 2, knots[-1] * 2]
    return np.array(
        sorted({min(knot, max(1, max_value)) for knot in knots}), dtype=np.float64
    )


@dataclass(slots=True)
class CostTable:
    """Milliseconds by count (tokens or requests), monotone, learnt online.

        cost_ms = level * (base[count] * deviation[count] + slope * context + constant)

    The start-up profile (or a prior) is the base; level, deviations, the slope of the
    context (tokens attended to) and the constant are learnt together (`cost_filter`).
    Linear between points and, with the last slope, beyond them; a count that the engine
    pads counts as what it is padded to, in estimates and in learning.

    Attributes:
        max_count: Largest count.
        first_ms: Prior cost of a count of 1.
        per_unit_ms: Prior cost of one more.
        padded_sizes: As `EngineLimits.padded_sizes`.
        has_context: Samples say how many tokens they attended to.
        num_resets: How often what was learnt had lost all sense and was dropped for
            the base costs; a sign of a clock that cannot be trusted.

    Source: ours; vLLM's cost tables are profiled once and never updated.
    """

    max_count: int
    first_ms: float
    per_unit_ms: float
    padded_sizes: tuple[int, ...] = ()
    has_context: bool = False
    num_resets: int = field(init=False, default=0)
    _counts: NDArray[np.float64] = field(init=False)
    _sizes: NDArray[np.float64] = field(init=False)
    _knots: NDArray[np.float64] = field(init=False)
    _knot_xs: NDArray[np.float64] = field(init=False)
    _xs: NDArray[np.float64] = field(init=False)
    _base_ys: NDArray[np.float64] = field(init=False)
    _value_ys: NDArray[np.float64] = field(init=False)
    _mean: NDArray[np.float64] = field(init=False)
    _covariance: NDArray[np.float64] = field(init=False)
    _first_covariance: NDArray[np.float64] = field(init=False)
    _is_profiled: bool = field(init=False, default=False)
    _is_drawn: bool = field(init=False, default=False)
    _level: float = field(init=False, default=1.0)
    _noise_state: NoiseState = field(init=False, default=NoiseState())

    def __post_init__(self) -> None:
        """Lay out the points and the prior."""
        self._knots = make_knots(self.max_count)
        self._knot_xs = place_points(self._knots)
        self._sizes = np.array(self.padded_sizes, dtype=np.float64)
        # Between two padded sizes nothing runs.
        beyond = self._knots[self._knots > max(self.padded_sizes, default=0)]
        self._counts = np.concatenate((self._sizes, beyond))
        self._xs = place_points(self._counts)
        prior_ms = self.first_ms + self.per_unit_ms * (self._counts - 1.0)
        self._begin(prior_ms, profiled=False)

    @property
    def slope_ms(self) -> float:
        """Milliseconds per token attended to, >= 0."""
        return self._level * float(self._mean[SLOPE])

    def predict(self, count: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return milliseconds for one or many counts; 0 where the count is <= 0.

        The context, which has a cost of its own, is no part of it.
        """
        counts = np.asarray(count, dtype=np.float64)
        costs_ms = costs_at(
            self._xs, self._values(), self._sizes, self._level, counts.ravel()
        )
        return costs_ms.reshape(counts.shape)

    def add_range(self, costs_ms: NDArray[np.float64], first: int) -> None:
        """Add the costs of `first`, `first + 1`, ... to an array, in place.

        As `predict` does, in a fraction of the time.
        """
        costs_from(costs_ms, self._xs, self._values(), self._sizes, self._level, first)

    def at(self, count: float) -> float:
        """Return milliseconds for one count, as `predict` does."""
        return cost_at(self._xs, self._values(), self._sizes, self._level, float(count))

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
        values = np.interp(self._counts, xs, ys)
        if xs.size > 1:
            slope = max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
            beyond = self._counts > xs[-1]
            values[beyond] = ys[-1] + slope * (self._counts[beyond] - xs[-1])
        # All zeros stand for what was not timed.
        self._begin(values, profiled=bool(ys[-1] > 0.0))

    def observe(
        self, count: float, measured_ms: float, num_context_tokens: float = 0.0
    ) -> float:
        """Learn from one sample; non-positive counts and times are ignored.

        Args:
            count: Tokens or requests.
            measured_ms: What they took.
            num_context_tokens: Attended to, >= 0.

        Returns:
            The factor by which level and constant moved the cost of that count, 1 if
            nothing was learnt.
        """
        if count <= 0 or not math.isfinite(measured_ms) or measured_ms <= 0.0:
            return 1.0
        before, constant = self._level, float(self._mean[CONSTANT])
        if constant > 0.0:
            # Whose share of the cost it may lose: that must be the latest cost.
            self._values()
        self._noise_state, makes_sense = learn_sample(
            self._mean,
            self._covariance,
            self._first_covariance,
            self._noise_state,
            self._knot_xs,
            self._xs,
            self._base_ys,
            pad_count(self._sizes, float(count)),
            float(measured_ms),
            float(num_context_tokens) if self.has_context else 0.0,
        )
        if not makes_sense:
            self.num_resets += 1
            self._begin(self._base_ys[FIRST_KNOT:-1], profiled=self._is_profiled)
            return 1.0
        self._level = math.exp(self._mean[0])
        self._is_drawn = False
        factor = self._level / before
        change = float(self._mean[CONSTANT] - constant)
        if change != 0.0:
            cost_ms = cost_at(
                self._xs, self._value_ys, self._sizes, before, float(count)
            )
            factor *= 1.0 + before * change / cost_ms
        return factor

    def rescale(self, factor: float) -> None:
        """Follow a level that was measured elsewhere on the same device."""
        level = self._mean[0] + math.log(factor)
        self._mean[0] = min(max(level, -MOST_CHANGE), MOST_CHANGE)
        self._level = math.exp(self._mean[0])
        if self._covariance[0, 0] < LEVEL_STD**2:
            self._covariance[0, 0] += (
                LEVEL_PROCESS_NOISE * self._noise_state.noise
            ) ** 2

    def export_state(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "knots": self._counts.tolist(),
            "value_ms": self.predict(self._counts).tolist(),
            "slope_ms": self.slope_ms,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from what another engine's table says of this one's counts.

        Raises:
            ValueError: It cannot be true; nothing has changed then.
        """
        knots = read_array(state, "knots", least=1.0, most=MOST_COUNT)
        value_ms = read_array(state, "value_ms", size=knots.size, most=MOST_MS)
        slope_ms = read_number(state, "slope_ms", most=MOST_MS)
        if (np.diff(knots) <= 0.0).any():
            raise ValueError("state's 'knots' must rise")
        # Rounding between two equal knots moves the last digit.
        if (np.diff(value_ms) < -1e-9 * value_ms[1:]).any():
            raise ValueError("state's 'value_ms' must not fall")
        xs = place_points(knots)
        ys = np.empty_like(xs)
        draw_through(xs, ys, np.maximum.accumulate(value_ms))
        self._begin(np.interp(self._counts, xs, ys), profiled=True)
        self._mean[SLOPE] = slope_ms if self.has_context else 0.0

    def _begin(self, values: NDArray[np.float64], *, profiled: bool) -> None:
        base_ms = np.clip(values, LEAST_MS, MOST_MS)
        self._is_profiled = profiled
        self._base_ys, self._value_ys = np.empty_like(self._xs), np.empty_like(self._xs)
        draw_through(self._xs, self._base_ys, base_ms)
        self._mean = np.zeros(self._knots.size + 3)
        context_std = CONTEXT_STD * float(base_ms[0]) if self.has_context else 0.0
        self._first_covariance = initial_covariance(
            self._knots, profiled=profiled, context_std=context_std
        )
        self._covariance = self._first_covariance.copy()
        self._level, self._noise_state = 1.0, NoiseState()
        self._draw()

    def _values(self) -> NDArray[np.float64]:
        """Return the curve; drawn when somebody asks, not after every sample."""
        if not self._is_drawn:
            self._draw()
        return self._value_ys

    def _draw(self) -> None:
        self._is_drawn = True
        costs_ms = apply_deviations(
            self._mean, self._covariance, self._knot_xs, self._xs, self._base_ys
        )
        draw_through(self._xs, self._value_ys, costs_ms)
