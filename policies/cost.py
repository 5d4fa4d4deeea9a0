"""Step time as a function of what the step carries, learnt from every step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One measured engine step and what it carried.

    Attributes:
        num_reqs: Requests in the step.
        num_decode_tokens: Tokens of decoding requests in the target's forward pass:
            one per request and the verified drafts.
        num_prefill_tokens: Prompt tokens in the same pass.
        num_context_tokens: KV positions attended to, summed over requests.
        depth: Draft tokens per request made after verification; 0 if none.
        target_ms: Target forward pass and sampling.
        draft_first_ms: The drafter's first pass, over every token of the step; 0 if it
            was skipped.
        draft_next_ms: All further draft passes together, `depth - 1` of them.
        host_ms: The rest of the step: scheduling, bookkeeping, output.
        catch_up_ms: Filling the drafter's KV cache after it had been skipped; not part
            of the step's own cost.
        num_caught_up: Positions filled then.
    """

    num_reqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    depth: int
    target_ms: float
    draft_first_ms: float
    draft_next_ms: float
    host_ms: float
    catch_up_ms: float = 0.0
    num_caught_up: int = 0

    @property
    def num_tokens(self) -> int:
        """All tokens of the target's forward pass."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def total_ms(self) -> float:
        """Wall time of the step, without catching up."""
        return self.target_ms + self.draft_first_ms + self.draft_next_ms + self.host_ms


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Forward passes timed at start-up, before there is anything to learn from.

    Attributes:
        num_tokens: `[num_samples]`, rising.
        target_ms: `[num_samples]`, the target's pass over that many tokens.
        draft_ms: `[num_samples]`, one pass of the drafter; empty if it has none.
    """

    num_tokens: tuple[int, ...]
    target_ms: tuple[float, ...]
    draft_ms: tuple[float, ...] = ()


MIN_STEPS_TO_TEACH = 100
"""Measured steps from which on what was learnt is worth more to a new replica than its
own start-up profile."""

EAGER_SAMPLES = 64
REFRESH_EVERY = 4
"""Samples between two looks at the whole table, once it has settled: drift, which is
fast, needs none."""

USUAL_RATE = 0.003
"""Share by which a sample moves the usual context, as slowly as the trend."""

TREND_KEEP = 0.997
"""Per-sample memory of the trend, about 300 samples."""

ENTRY_KEEP = 0.96
"""Per-visit memory of a table entry's own deviation, about 25 visits."""

ENTRY_PRIOR = 2.0
"""Visits that the trend counts for against an entry's own deviation."""

OUTLIER_FACTOR = 4.0
"""A residual beyond this many typical ones moves the table as if it were this large:
a page fault or a neighbour's burst is not a new price."""

DRIFT_KEEP = 0.95
"""Per-sample memory of drift, about 20 samples: a stolen core or a throttled clock
changes the price of every count at once, most of them unvisited."""


def make_knots(max_value: int) -> NDArray[np.float64]:
    """Return table positions: every count to 16, then ever wider, up to `max_value`.

    Small counts come dense because batched decoding lives there and kernels change
    their tiling there.
    """
    knots = list(range(1, 17))
    step = 4
    while knots[-1] < max_value:
        for _ in range(8):
            knots.append(knots[-1] + step)
        step *= 2
    clipped = sorted({min(knot, max(1, max_value)) for knot in knots})
    return np.array(clipped, dtype=np.float64)


@dataclass(slots=True)
class _LineFit:
    """Decayed least squares of `y = level + slope * x`, held where it was.

    Attributes:
        keep: Share of the past kept per sample.
        level: Fitted level. One sample's worth of prior says it is `rest`, or, where
            that is None, what it was.
        slope: Fitted slope, >= `min_slope`; moves only as far as `x` varied.
    """

    keep: float
    min_slope: float
    rest: float | None = None
    level: float = 1.0
    slope: float = 0.0
    _weight: float = field(init=False, default=0.0)
    _x: float = field(init=False, default=0.0)
    _xx: float = field(init=False, default=0.0)
    _y: float = field(init=False, default=0.0)
    _xy: float = field(init=False, default=0.0)

    def predict(self, x: float) -> float:
        return self.level + self.slope * x

    def fit(self, x: float, y: float) -> None:
        # Plain floats: this runs several times a step, and arrays of five are slow.
        keep = self.keep
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + x
        self._xx = keep * self._xx + x * x
        self._y = keep * self._y + y
        self._xy = keep * self._xy + x * y
        hold = self._xx / self._weight
        weight = self._weight + 1.0
        level = self._y + (self.level if self.rest is None else self.rest)
        if hold > 0.0:
            second, cross = self._xx + hold, self._xy + hold * self.slope
            determinant = weight * second - self._x * self._x
            slope = (weight * cross - self._x * level) / determinant
            self.slope = max(self.min_slope, slope)
        self.level = max((level - self.slope * self._x) / weight, 1e-3)


@dataclass(slots=True)
class CostTable:
    """Milliseconds by count (tokens or requests), monotone, learnt online.

        price = drift * trend(count) * (1 + deviation[count])
              + slope * (extra - usual extra)

    Four layers, from slow to fast, each learning what the ones before leave over:
    the start-up profile (or a prior) gives the shape; the trend bends it in level and
    per-count price, so that counts never visited follow the others; every knot has a
    deviation of its own, believed in proportion to its visits (a staircase shows here);
    drift and the slope of `extra` (context length) are fitted jointly to the last 20
    samples. The slope prices deviations from the usual extra alone: what a constant
    context costs is part of the table. Linear between knots and, with the last slope,
    beyond them.

    Source: ours; vLLM's cost tables are profiled once and never updated.
    """

    max_count: int
    first_ms: float
    per_unit_ms: float
    knots: NDArray[np.float64] = field(init=False)
    _knot_list: list[float] = field(init=False)
    _base_ms: NDArray[np.float64] = field(init=False)
    _value_ms: NDArray[np.float64] = field(init=False)
    _deviation: NDArray[np.float64] = field(init=False)
    _num_visits: NDArray[np.float64] = field(init=False)
    _trend: _LineFit = field(init=False)
    _drift: _LineFit = field(init=False)
    _usual_extra: float = field(init=False, default=0.0)
    _num_samples: int = field(init=False, default=0)
    _typical_residual: float = field(init=False, default=0.5)

    def __post_init__(self) -> None:
        """Lay out the knots and the prior."""
        self.knots = make_knots(self.max_count)
        self._knot_list = self.knots.tolist()
        self._set(self.first_ms + self.per_unit_ms * (self.knots - 1.0))

    @property
    def slope_ms(self) -> float:
        """Milliseconds per unit of `extra`."""
        return self._drift.slope

    def extra_ms(self, extra: float) -> float:
        """Return what `extra` adds to the price, negative below the usual."""
        return self._drift.slope * (extra - self._usual_extra)

    def predict(self, count: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return milliseconds for one or many counts; 0 where the count is <= 0."""
        counts = np.asarray(count, dtype=np.float64)
        price = np.interp(counts, self.knots, self._value_ms)
        if self.knots.size > 1:
            slope = (self._value_ms[-1] - self._value_ms[-2]) / (
                self.knots[-1] - self.knots[-2]
            )
            price = price + slope * np.maximum(counts - self.knots[-1], 0.0)
        return np.where(counts > 0, price * self._drift.level, 0.0)

    def at(self, count: float) -> float:
        """Return milliseconds for one count, as `predict` does but ten times faster."""
        if count <= 0:
            return 0.0
        return self._interpolate(self._value_ms, count) * self._drift.level

    def _interpolate(self, values: NDArray[np.float64], count: float) -> float:
        knots = self._knot_list
        right = min(max(bisect_left(knots, count), 1), len(knots) - 1)
        if right == 0 or count <= knots[0]:
            return float(values[0])
        low, high = knots[right - 1], knots[right]
        share = (count - low) / (high - low)
        return float(values[right - 1] * (1.0 - share) + values[right] * share)

    def fit_profile(self, counts: Sequence[int], measured_ms: Sequence[float]) -> None:
        """Replace the prior by a start-up profile.

        Between profiled counts the shape is linear; below the first and beyond the
        last it keeps their level and the last slope.
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

    def observe(self, count: int, measured_ms: float, extra: float = 0.0) -> float:
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
        if self._usual_extra == 0.0:
            self._usual_extra = extra
        drift_before = self._drift.level
        value = self.at(count) / drift_before
        known_ms = self._limit_outlier(
            measured_ms, max(drift_before * value + self.extra_ms(extra), 1e-4)
        )
        self._drift.fit((extra - self._usual_extra) / value, known_ms / value)
        plain_ms = max(known_ms - self.extra_ms(extra), 1e-4)
        self._usual_extra += USUAL_RATE * (extra - self._usual_extra)
        self._learn_shape(float(count), plain_ms, plain_ms / self._drift.level)
        return self.at(count) / (value * drift_before)

    def rescale(self, factor: float) -> None:
        """Follow a drift that was measured elsewhere on the same device."""
        self._drift.level *= factor

    def export_state(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "knots": self.knots.tolist(),
            "value_ms": (self._value_ms * self._drift.level).tolist(),
            "slope_ms": self.slope_ms,
            "usual_extra": self._usual_extra,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another engine's table, resampled to this one's knots."""
        knots = np.array(state["knots"], dtype=np.float64)
        self._set(np.interp(self.knots, knots, np.array(state["value_ms"])))
        self._drift.slope = float(state["slope_ms"])
        self._usual_extra = float(state["usual_extra"])

    def _set(self, values: NDArray[np.float64]) -> None:
        self._base_ms = np.maximum(values, 1e-4)
        self._deviation = np.zeros_like(self.knots)
        self._num_visits = np.zeros_like(self.knots)
        self._trend = _LineFit(TREND_KEEP, min_slope=-np.inf)
        self._drift = _LineFit(DRIFT_KEEP, min_slope=0.0, rest=1.0)
        self._value_ms = _make_monotone(self._base_ms)

    def _limit_outlier(self, measured_ms: float, predicted_ms: float) -> float:
        relative = measured_ms / max(predicted_ms, 1e-6) - 1.0
        limit = OUTLIER_FACTOR * self._typical_residual
        self._typical_residual += 0.05 * (
            min(abs(relative), 4.0 * limit) - self._typical_residual
        )
        self._typical_residual = max(self._typical_residual, 0.01)
        return predicted_ms * (1.0 + min(max(relative, -min(limit, 0.9)), limit))

    def _learn_shape(self, count: float, plain_ms: float, steady_ms: float) -> None:
        """Bend the trend by the sample itself, entries by the sample without drift."""
        base_ms = self._interpolate(self._base_ms, count)
        self._trend.fit(count / base_ms, plain_ms / base_ms)
        trend_ms = base_ms * self._trend.predict(count / base_ms)
        own = steady_ms / max(trend_ms, 1e-6) - 1.0
        knots = self._knot_list
        within = min(count, knots[-1])
        right = bisect_left(knots, within)
        shares = {right: 1.0}
        if right > 0:
            share = (within - knots[right - 1]) / (knots[right] - knots[right - 1])
            shares = {right - 1: 1.0 - share, right: share}
        for index, share in shares.items():
            keep = ENTRY_KEEP**share
            self._deviation[index] = keep * self._deviation[index] + share * own
            self._num_visits[index] = keep * self._num_visits[index] + share
        self._num_samples += 1
        if self._num_samples < EAGER_SAMPLES or self._num_samples % REFRESH_EVERY == 0:
            self._refresh()

    def _refresh(self) -> None:
        trend = self._base_ms * self._trend.level + self._trend.slope * self.knots
        belief = self._deviation / (self._num_visits + ENTRY_PRIOR)
        self._value_ms = _make_monotone(np.maximum(trend * (1.0 + belief), 1e-4))


def _make_monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a non-decreasing compromise: half what to raise, half what to lower."""
    raised = np.maximum.accumulate(values)
    lowered = np.minimum.accumulate(values[::-1])[::-1]
    middle: NDArray[np.float64] = 0.5 * (raised + lowered)
    return middle


@dataclass(slots=True)
class StepCost:
    """Predicts what a step costs, part by part, and how wrong it was lately.

        step = target(decode tokens) + prefill(prompt tokens) + context * KV positions
             + draft_first(all tokens) + (depth - 1) * draft_next(num_reqs)
             + host(num_reqs)

    The parts are told apart by the worker's own timestamps: at a constant depth their
    sum alone would not identify them.

    Attributes:
        num_steps: Steps observed so far.

    Source: ours.
    """

    max_tokens: int
    max_reqs: int
    target: CostTable = field(init=False)
    prefill: CostTable = field(init=False)
    draft_first: CostTable = field(init=False)
    draft_next: CostTable = field(init=False)
    host: CostTable = field(init=False)
    num_steps: int = field(init=False, default=0)
    _is_warm: bool = field(init=False, default=False)
    _error: float = field(init=False, default=0.0)
    _predicted_ms: float = field(init=False, default=0.0)
    _measured_ms: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Create the tables with priors of a mid-sized model on a busy machine."""
        self.target = CostTable(self.max_tokens, first_ms=20.0, per_unit_ms=0.5)
        self.prefill = CostTable(self.max_tokens, first_ms=1.0, per_unit_ms=0.3)
        self.draft_first = CostTable(self.max_tokens, first_ms=2.0, per_unit_ms=0.05)
        self.draft_next = CostTable(self.max_reqs, first_ms=2.0, per_unit_ms=0.05)
        self.host = CostTable(self.max_reqs, first_ms=1.0, per_unit_ms=0.05)

    def context_ms(self, num_context_tokens: float) -> float:
        """Price KV positions attended to, against the usual number."""
        return self.target.extra_ms(num_context_tokens)

    def fit_profile(self, profile: CostProfile) -> None:
        """Replace the priors by what was timed at start-up.

        Nothing changes after `import_state`: real steps of another engine say more than
        dummy passes of this one.
        """
        if not profile.num_tokens or self._is_warm:
            return
        counts, target_ms = profile.num_tokens, profile.target_ms
        self.target.fit_profile(counts, target_ms)
        # What prompt tokens add to a step: the pass without its fixed part.
        added_ms = [max(ms - target_ms[0], 0.01) for ms in target_ms]
        self.prefill.fit_profile(counts, added_ms)
        if profile.draft_ms:
            self.draft_first.fit_profile(counts, profile.draft_ms)
            self.draft_next.fit_profile(counts, profile.draft_ms)

    def target_ms(
        self,
        num_decode_tokens: NDArray[np.float64] | float,
        num_prefill_tokens: float,
        num_context_tokens: float,
    ) -> NDArray[np.float64]:
        """Price the target's forward pass, for one or many decode token counts."""
        return (
            self.target.predict(num_decode_tokens)
            + self.prefill.predict(num_prefill_tokens)
            + self.context_ms(num_context_tokens)
        )

    def draft_next_ms(
        self, num_reqs: int, depth: NDArray[np.int64] | NDArray[np.float64] | int
    ) -> NDArray[np.float64]:
        """Price the draft passes after the first, for one or many depths."""
        passes = np.maximum(np.asarray(depth, dtype=np.float64) - 1.0, 0.0)
        return passes * self.draft_next.at(num_reqs)

    def host_ms(self, num_reqs: int) -> float:
        """Price the rest of the step."""
        return self.host.at(num_reqs)

    def predict_ms(self, timing: StepTiming) -> float:
        """Predict the whole of a step that has been measured."""
        return (
            self.target.at(timing.num_decode_tokens)
            + self.prefill.at(timing.num_prefill_tokens)
            + self.context_ms(timing.num_context_tokens)
            + self._predict_draft_ms(timing)
            + self.host_ms(timing.num_reqs)
        )

    def _predict_draft_ms(self, timing: StepTiming) -> float:
        if timing.draft_first_ms <= 0:
            return 0.0
        return self.draft_first.at(timing.num_tokens) + (
            max(timing.depth - 1, 0) * self.draft_next.at(timing.num_reqs)
        )

    def observe(self, timing: StepTiming) -> float:
        """Learn from one step.

        Returns:
            The relative error of the prediction made before learning, >= 0.
        """
        predicted = self.predict_ms(timing)
        self._predicted_ms, self._measured_ms = predicted, timing.total_ms
        error = abs(predicted - timing.total_ms) / max(timing.total_ms, 1e-6)
        self.num_steps += 1
        rate = max(0.02, 1.0 / self.num_steps)
        self._error += rate * (min(error, 1.0) - self._error)
        drift = self._learn_target(timing)
        self.draft_first.observe(timing.num_caught_up, timing.catch_up_ms)
        # What did not run in this step drifts with what did: a stolen core slows both
        # models down, and a drafter believed slow would never be tried again.
        if timing.draft_first_ms > 0:
            self.draft_first.observe(timing.num_tokens, timing.draft_first_ms)
        else:
            self.draft_first.rescale(drift)
        if timing.depth > 1 and timing.draft_next_ms > 0:
            self.draft_next.observe(
                timing.num_reqs, timing.draft_next_ms / (timing.depth - 1)
            )
        else:
            self.draft_next.rescale(drift)
        self.host.observe(timing.num_reqs, timing.host_ms)
        return error

    def prediction_error(self) -> float:
        """Return the recent mean relative error of whole-step predictions."""
        return self._error

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry."""
        return {
            "predicted_step_ms": self._predicted_ms,
            "measured_step_ms": self._measured_ms,
            "step_time_error": self._error,
            "context_ms_per_token": self.target.slope_ms,
        }

    def export_state(self) -> dict[str, Any]:
        """Return everything learnt as plain values."""
        return {
            "target": self.target.export_state(),
            "prefill": self.prefill.export_state(),
            "draft_first": self.draft_first.export_state(),
            "draft_next": self.draft_next.export_state(),
            "host": self.host.export_state(),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another engine's `export_state`."""
        for name in ("target", "prefill", "draft_first", "draft_next", "host"):
            getattr(self, name).import_state(state[name])
        self._is_warm = True

    def _learn_target(self, timing: StepTiming) -> float:
        """Learn decoding from steps without prompts, prompts from what they add.

        Returns:
            The change of price seen in decoding, 1 for a step with prompts.
        """
        context = float(timing.num_context_tokens)
        if timing.num_prefill_tokens == 0:
            return self.target.observe(
                timing.num_decode_tokens, timing.target_ms, context
            )
        decode_ms = self.context_ms(context) + self.target.at(timing.num_decode_tokens)
        added_ms = max(timing.target_ms - decode_ms, 1e-3)
        self.prefill.observe(timing.num_prefill_tokens, added_ms)
        return 1.0
