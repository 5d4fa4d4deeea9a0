"""What steps cost, fitted offline to recorded traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .traces import Array, RecordedTrace


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
        """Price counts; linear between those seen, and beyond them with their slope."""
        counts, first, last = np.asarray(count, float), self.counts[0], self.counts[-1]
        price = np.interp(counts, self.counts, self.price_ms)
        if last > first:
            slope = (self.price_ms[-1] - self.price_ms[0]) / (last - first)
            price = price + slope * np.maximum(counts - last, 0.0)
            price = price - slope * np.maximum(first - counts, 0.0)
        price = np.maximum(price, 0.0)
        return np.asarray(price, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Parts of a step's time at one load.

    Attributes:
        target: The target's pass, by decode tokens.
        draft_first: The drafter's first pass, by the same.
        draft_next_ms: Each further pass.
        host_ms: The rest.
    """

    target: PriceCurve
    draft_first: PriceCurve
    draft_next_ms: float
    host_ms: float

    def step_ms(self, num_tokens: Array | float, depth: int) -> Array:
        """Price steps that verify `num_tokens` tokens and draft `depth` deep."""
        price = self.target.at(num_tokens) + self.host_ms
        if depth == 0:
            return price
        return (
            price + self.draft_first.at(num_tokens) + (depth - 1) * (self.draft_next_ms)
        )


def decode_steps(trace: RecordedTrace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell which steps were timed and carried no prompt, `[num_steps]`."""
    timed = ~np.isnan(trace.step("target_ms"))
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = timed & (
        trace.step("num_prefill_tokens") == 0
    )
    return mask


def fit_prices(traces: Iterable[RecordedTrace]) -> StepPrices | None:
    """Fit prices to the decoding steps of all arms at one load.

    Medians by count shrug off bursts; arms of different depth cover different counts.

    Returns:
        The prices; None if no arm drafted or nothing was timed.
    """
    parts: dict[str, list[Array]] = {
        name: []
        for name in ("tokens", "target", "first", "first_tokens", "next", "host")
    }
    for trace in traces:
        kept = decode_steps(trace)
        tokens, depth = trace.step("num_decode_tokens"), trace.step("depth")
        first, later = trace.step("draft_first_ms"), trace.step("draft_next_ms")
        drafted = kept & (first > 0)
        deep = drafted & (depth > 1)
        parts["tokens"].append(tokens[kept])
        parts["target"].append(trace.step("target_ms")[kept])
        parts["host"].append(trace.step("host_ms")[kept])
        parts["first_tokens"].append(tokens[drafted])
        parts["first"].append(first[drafted])
        parts["next"].append(later[deep] / (depth[deep] - 1))
    joined = {name: np.concatenate(own) for name, own in parts.items() if own}
    if not joined or joined["first"].size == 0:
        return None
    return StepPrices(
        target=fit_curve(joined["tokens"], joined["target"]),
        draft_first=fit_curve(joined["first_tokens"], joined["first"]),
        draft_next_ms=float(np.median(joined["next"])) if joined["next"].size else 0.0,
        host_ms=float(np.median(joined["host"])),
    )


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
