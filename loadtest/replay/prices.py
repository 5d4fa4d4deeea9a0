"""What steps cost at one load, fitted to the decoding steps of all traced arms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.arms import Arm

from .traces import Array, RecordedTrace

BURST_DEVIATIONS = 5.0
"""Median deviations past which a sample is a burst."""


@dataclass(frozen=True, slots=True)
class PriceCurve:
    """Milliseconds by number of tokens, never falling.

    Attributes:
        counts: `[num_counts]`, rising.
        price_ms: `[num_counts]`.
    """

    counts: Array
    price_ms: Array

    def at(self, count: Array | float) -> Array:
        """Price counts; linear between those seen, and beyond them with their slope.

        Below the smallest seen a token never gets cheaper: a slope between two noisy
        ends would make small steps free, and whoever verifies nothing the fastest.
        """
        counts, first, last = np.asarray(count, float), self.counts[0], self.counts[-1]
        price = np.interp(counts, self.counts, self.price_ms)
        if last > first:
            slope = (self.price_ms[-1] - self.price_ms[0]) / (last - first)
            price = price + slope * np.maximum(counts - last, 0.0)
            price = price - slope * np.maximum(first - counts, 0.0)
        least = self.price_ms[0] * np.clip(counts / first, 0.0, 1.0)
        price = np.maximum(price, least)
        return np.asarray(price, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class ContextPrice:
    """What KV positions attended to cost, against the usual number of them.

    Attributes:
        per_token_ms: >= 0; 0 where a trace does not tell it from noise.
        usual: Positions at which the target's curve was taken.
    """

    per_token_ms: float = 0.0
    usual: float = 0.0

    def at(self, num_context_tokens: Array | float) -> Array:
        """Price positions, summed over requests; below 0 for fewer than usual."""
        beyond = np.asarray(num_context_tokens, float) - self.usual
        return np.asarray(self.per_token_ms * np.nan_to_num(beyond))


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Parts of a step's time at one load.

    Attributes:
        target: The target's pass, by decode tokens.
        draft_first: The drafter's first pass, by the same.
        draft_next_ms: Each further pass, with what is decided between two of them.
        host_ms: The rest, planning included.
        context: Of the KV positions that the target attends to.
    """

    target: PriceCurve
    draft_first: PriceCurve
    draft_next_ms: float
    host_ms: float
    context: ContextPrice = ContextPrice()

    def step_ms(self, num_tokens: Array | float, depth: int) -> Array:
        """Price steps that verify `num_tokens` tokens and draft `depth` deep.

        At the usual context: `context` tells what another one adds.
        """
        return self.target.at(num_tokens) + self.rest_ms(num_tokens, depth)

    def rest_ms(self, num_tokens: Array | float, depth: int) -> Array:
        """Price all but the target's pass."""
        if depth == 0:
            return np.full_like(np.asarray(num_tokens, float), self.host_ms)
        passes_ms = (depth - 1) * self.draft_next_ms
        return self.draft_first.at(num_tokens) + (passes_ms + self.host_ms)

    def backlog_ms(self, num_positions: int) -> float:
        """Price filling the drafter's cache where it was skipped: a pass over all."""
        return float(self.draft_first.at(num_positions)) if num_positions else 0.0


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of every arm: the models' passes are everybody's, the rest is its own.

    Attributes:
        shared: Host and pass prices are medians over all arms of fixed depth, which
            plan nothing.
        cheapest: Those of the cheapest arm.
        by_arm: Each arm's own; `shared` ones where it was never timed.
    """

    shared: StepPrices
    cheapest: StepPrices
    by_arm: Mapping[Arm, StepPrices]

    def of(self, arm: Arm) -> StepPrices:
        """Return an arm's prices; those of fixed depth for one that was not traced."""
        return self.by_arm.get(arm, self.shared)


def decode_steps(trace: RecordedTrace) -> NDArray[np.bool_]:
    """Tell which steady steps were timed and had no prompt, `[num_steps]`."""
    timed = ~np.isnan(trace.step("target_ms"))
    mask: NDArray[np.bool_] = (
        timed & (trace.step("num_prefill_tokens") == 0) & trace.is_steady()
    )
    return mask


def fit_prices(traces: Mapping[Arm, RecordedTrace]) -> PriceList | None:
    """Fit prices to the decoding steps of all arms at one load.

    The same kernels run whoever asks for them, so the passes of all arms make one curve
    of each model: arms of different depth cover different counts, and medians by count
    shrug off bursts. What an arm does between the passes is its own.

    Returns:
        The prices; None if no arm drafted or nothing was timed.
    """
    parts = {arm: _read_parts(trace) for arm, trace in traces.items()}
    tokens, target_ms = _join(parts.values(), lambda part: part.target)
    first_tokens, first_ms = _join(parts.values(), lambda part: part.first)
    if first_ms.size == 0:
        return None
    target, first = fit_curve(tokens, target_ms), fit_curve(first_tokens, first_ms)
    context_tokens, _ = _join(parts.values(), lambda part: part.context)
    context = fit_context(tokens, context_tokens, target_ms)
    plain = [part for arm, part in parts.items() if arm.policy == "fixed"]
    plain = plain or list(parts.values())
    shared = StepPrices(
        target,
        first,
        _median(p.next_ms for p in plain),
        _median(p.host_ms for p in plain),
        context,
    )
    own = {
        arm: StepPrices(
            target,
            first,
            _median([part.next_ms], shared.draft_next_ms),
            _median([part.host_ms], shared.host_ms),
            context,
        )
        for arm, part in parts.items()
    }
    cheapest = StepPrices(
        target,
        first,
        min(prices.draft_next_ms for prices in own.values()),
        min(prices.host_ms for prices in own.values()),
        context,
    )
    return PriceList(shared, cheapest, own)


def fit_curve(counts: Array, measured_ms: Array) -> PriceCurve:
    """Fit a never falling curve to at least one sample.

    Isotonic regression (pool adjacent violators) of the medians by count, weighted by
    their samples.
    """
    seen = np.unique(counts)
    pools: list[tuple[float, float, int]] = []
    for count in seen:
        own = measured_ms[counts == count]
        pools.append((float(np.median(own)), float(own.size), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, a, n), (high, b, m) = pools.pop(-2), pools.pop()
            pools.append(((low * a + high * b) / (a + b), a + b, n + m))
    price_ms = np.concatenate([np.full(n, price) for price, _, n in pools])
    return PriceCurve(seen.astype(np.float64), price_ms)


def fit_context(
    counts: Array, num_context_tokens: Array, measured_ms: Array
) -> ContextPrice:
    """Fit the price of context to samples of the target's pass.

    Least squares among samples of equal count, each against the median of its count;
    bursts are cut off. Contexts of a steady load differ little, and noise has a slope
    too: one below three times its standard error is none.
    """
    if counts.size == 0:
        return ContextPrice()
    context, ms = np.array(num_context_tokens), np.array(measured_ms)
    for count in np.unique(counts):
        own = counts == count
        context[own] -= np.median(context[own])
        ms[own] -= np.median(ms[own])
    limit = BURST_DEVIATIONS * np.median(np.abs(ms))
    ms = np.clip(ms, -limit, limit)
    spread = float(context @ context)
    if spread == 0.0:
        return ContextPrice()
    slope = float(context @ ms) / spread
    error = float(np.sqrt(np.mean((ms - slope * context) ** 2) / spread))
    usual = float(np.median(num_context_tokens))
    return ContextPrice(slope if slope > 3.0 * error else 0.0, usual)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Samples of one arm: counts with milliseconds, or milliseconds alone."""

    target: tuple[Array, Array]
    context: tuple[Array, Array]
    first: tuple[Array, Array]
    next_ms: Array
    host_ms: Array


def _read_parts(trace: RecordedTrace) -> _Parts:
    kept = decode_steps(trace)
    tokens, depth = trace.step("num_decode_tokens"), trace.step("depth")
    target_ms = trace.step("target_ms")
    first, later = trace.step("draft_first_ms"), trace.step("draft_next_ms")
    drafted = kept & (first > 0)
    deep = drafted & (depth > 1)
    return _Parts(
        target=(tokens[kept], target_ms[kept]),
        context=(trace.step("num_context_tokens")[kept], target_ms[kept]),
        first=(tokens[drafted], first[drafted]),
        next_ms=later[deep] / (depth[deep] - 1),
        host_ms=trace.step("host_ms")[kept],
    )


def _join(
    parts: Iterable[_Parts], read: Callable[[_Parts], tuple[Array, Array]]
) -> tuple[Array, Array]:
    pairs = [read(part) for part in parts]
    if not pairs:
        return np.empty(0), np.empty(0)
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def _median(samples: Iterable[Array], otherwise: float = 0.0) -> float:
    joined = np.concatenate([np.empty(0), *samples])
    return float(np.median(joined)) if joined.size else otherwise
