"""How much better any selector could have done: bounds from recorded traces.

The arm that verified the deepest drafts of all requests knows the outcome of every
draft it recorded. Its decoding steps are replayed: a selector chooses among the
recorded drafts, is paid the tokens that were in fact accepted, and is charged the
prices fitted to all arms of the cell. Prompts are left out, and so is the fact that
other choices would have led to other drafts: recorded blocks stand for those to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.budget import choose_draft_budget
from policies.calibration import ConfidenceCalibration
from policies.selection import select_drafts

from .arms import Arm
from .prices import StepPrices, fit_prices
from .traces import Array, RecordedTrace

NUM_FITTING_PASSES = 3
MAX_PRICE_UPDATES = 12
MIN_HEADROOM = 0.01
"""Below this share of the best fixed k there is no headroom to speak of."""


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One recorded step whose drafts were all verified, its prompts left out.

    Attributes:
        num_reqs: Requests that decoded, with or without drafts.
        acceptance: `[num_drafting, max_depth]`, 0-1, acceptance as predicted by the
            offline calibration.
        num_accepted: `[num_drafting]`, what the target accepted of each draft.
    """

    num_reqs: int
    acceptance: Array
    num_accepted: NDArray[np.int64]

    def gain(self, num_admitted: NDArray[np.int64]) -> float:
        """Return the tokens of the step if so much of each draft is verified."""
        return self.num_reqs + float(np.minimum(num_admitted, self.num_accepted).sum())


Play = Callable[[ReplayStep, float], tuple[float, float]]
"""Plays a step at a price of a millisecond in tokens: tokens and milliseconds."""


def find_bounds(traces: Mapping[Arm, RecordedTrace]) -> dict[str, Any] | None:
    """Compute all bounds of one cell, in tokens per second of decoding.

    Args:
        traces: Of the cell, by arm.

    Returns:
        Plain values; None without a trace of a fixed arm. `fixed` by depth, `none`,
        `hindsight` (with its depth), `clairvoyant`, and `achieved` by arm: each arm's
        own decisions at the same prices. `headroom_share` by arm is
        `(achieved - best fixed) / (hindsight - best fixed)`, None without headroom.
    """
    fixed = [arm for arm in traces if arm.policy == "fixed"]
    prices = fit_prices(traces.values())
    if not fixed or prices is None:
        return None
    deepest = max(fixed, key=lambda arm: arm.draft_tokens)
    steps = read_steps(traces[deepest])
    if not steps:
        return None
    max_depth = deepest.draft_tokens
    by_depth = {
        depth: maximise(steps, play_fixed(prices, depth))
        for depth in range(max_depth + 1)
    }
    selectors = {
        depth: maximise(steps, play_hindsight(prices, depth))
        for depth in range(max_depth + 1)
    }
    depth = max(selectors, key=lambda depth: selectors[depth])
    hindsight = selectors[depth]
    best_fixed = max(by_depth[k] for k in range(1, max_depth + 1))
    achieved = {
        arm.name: speed
        for arm, trace in traces.items()
        if (speed := replay_own(trace, prices)) is not None
    }
    headroom = hindsight - best_fixed
    return {
        "none": by_depth[0],
        "fixed": {f"fixed:{k}": by_depth[k] for k in range(1, max_depth + 1)},
        "hindsight": hindsight,
        "hindsight_depth": depth,
        "clairvoyant": maximise(steps, play_clairvoyant(prices, max_depth)),
        "achieved": achieved,
        "headroom_share": {
            name: (speed - best_fixed) / headroom
            if headroom > MIN_HEADROOM * best_fixed
            else None
            for name, speed in achieved.items()
        },
        "num_steps": len(steps),
    }


def read_steps(trace: RecordedTrace) -> list[ReplayStep]:
    """Read the steps in which requests decoded and all of whose drafts were verified.

    Under load nearly every step carries a prompt as well. Its time is left out: it
    belongs to the tokens of that request, whatever is verified beside it.

    Acceptance is predicted by a calibration fitted to the whole trace, with request
    effects from what came before.
    """
    confidence = np.nan_to_num(trace.draft("confidence"))
    verified = trace.draft("num_verified").astype(np.int64)
    accepted = trace.draft("num_accepted").astype(np.int64)
    offered = trace.draft("num_offered").astype(np.int64)
    step = trace.draft("step").astype(np.int64)
    req = trace.draft("req").astype(np.int64)
    known = (accepted >= 0) & (verified == offered)
    rows_of = {
        int(number): np.flatnonzero((step == number) & known)
        for number in np.unique(step[known])
    }
    predicted = predict_in_hindsight(
        confidence, req, verified, accepted, list(rows_of.values())
    )
    # Positions that were not offered never survive.
    predicted[np.arange(predicted.shape[1]) >= offered[:, None]] = 0.0
    num_decode_tokens = trace.step("num_decode_tokens")
    unknown = set(np.unique(step[~known]).tolist())
    return [
        ReplayStep(
            int(num_decode_tokens[number] - verified[rows].sum()),
            predicted[rows],
            accepted[rows],
        )
        for number, rows in rows_of.items()
        if number < num_decode_tokens.size
        and not np.isnan(num_decode_tokens[number])
        and number not in unknown
    ]


def predict_in_hindsight(
    confidence: Array,
    req: NDArray[np.int64],
    num_verified: NDArray[np.int64],
    num_accepted: NDArray[np.int64],
    steps: Sequence[NDArray[np.intp]],
) -> Array:
    """Predict acceptance by a calibration that has seen all outcomes.

    Args:
        confidence: `[num_drafts, max_depth]`, 0-1.
        req: `[num_drafts]`, whose drafts.
        num_verified: `[num_drafts]`.
        num_accepted: `[num_drafts]`.
        steps: Row numbers of each step, in order.

    Returns:
        `[num_drafts, max_depth]`; 0 in rows of no step.
    """
    calibration = ConfidenceCalibration(confidence.shape[1])
    predicted = np.zeros_like(confidence)
    for _ in range(NUM_FITTING_PASSES + 1):
        for request in np.unique(req).tolist():
            calibration.forget(request)
        for rows in steps:
            req_ids = req[rows].tolist()
            predicted[rows] = calibration.predict(confidence[rows], req_ids)
            calibration.observe(
                confidence[rows], req_ids, num_verified[rows], num_accepted[rows]
            )
    return predicted


def play_fixed(prices: StepPrices, depth: int) -> Play:
    """Verify everything `depth` deep."""

    def play(step: ReplayStep, _price: float) -> tuple[float, float]:
        lengths = np.minimum((step.acceptance > 0).sum(axis=1), depth)
        num_tokens = step.num_reqs + float(lengths.sum())
        return step.gain(lengths), float(prices.step_ms(num_tokens, depth))

    return play


def play_hindsight(prices: StepPrices, depth: int) -> Play:
    """Select as the goodput policy does, with calibration and prices of hindsight."""

    def play(step: ReplayStep, price: float) -> tuple[float, float]:
        survival = step.acceptance[:, :depth].cumprod(axis=1)
        lengths = (step.acceptance[:, :depth] > 0).sum(axis=1)
        candidates = np.sort(survival[survival > 0])[::-1]
        num_tokens = np.arange(candidates.size + 1, dtype=np.float64) + step.num_reqs
        step_ms = prices.step_ms(num_tokens, depth)
        budget = choose_draft_budget(candidates, step_ms, price).draft_budget
        admitted = select_drafts(survival, lengths, budget)
        return step.gain(admitted), float(step_ms[budget])

    return play


def play_clairvoyant(prices: StepPrices, max_depth: int) -> Play:
    """Draft as deep as pays, and verify nothing that is rejected."""

    def play(step: ReplayStep, price: float) -> tuple[float, float]:
        best = (-np.inf, 0.0, 0.0)
        for depth in range(max_depth + 1):
            num_right = int(np.minimum(step.num_accepted, depth).sum())
            tokens = np.arange(num_right + 1, dtype=np.float64) + step.num_reqs
            step_ms = prices.step_ms(tokens, depth)
            surplus = tokens - price * step_ms
            count = int(np.argmax(surplus))
            own = (float(surplus[count]), float(tokens[count]), float(step_ms[count]))
            best = max(best, own)
        return best[1], best[2]

    return play


def maximise(steps: Sequence[ReplayStep], play: Play) -> float:
    """Return the tokens per second of a selector that knows its own goodput.

    Maximising a ratio of sums is maximising, step by step, tokens minus time priced at
    the ratio itself (Dinkelbach); the price is updated until it stays.
    """
    price = 0.0
    for _ in range(MAX_PRICE_UPDATES):
        played = [play(step, price) for step in steps]
        before, price = price, sum(p[0] for p in played) / sum(p[1] for p in played)
        if abs(price - before) <= 1e-4 * price:
            break
    return 1e3 * price


def replay_own(trace: RecordedTrace, prices: StepPrices) -> float | None:
    """Return the tokens per second of a trace's own decisions at given prices.

    Steps whose outcome is not known in full are left out.
    """
    num_decode_tokens = trace.step("num_decode_tokens")
    num_steps = num_decode_tokens.size
    step = trace.draft("step").astype(np.int64)
    inside = step < num_steps
    accepted = trace.draft("num_accepted")
    gained = np.bincount(step[inside], np.maximum(accepted, 0)[inside], num_steps)
    verified = trace.draft("num_verified")
    counted = np.bincount(step[inside], verified[inside], num_steps)
    # An outcome is missing where something was admitted and nothing came of it.
    missing = (accepted < 0) & (trace.draft("num_admitted") > 0)
    unknown = np.bincount(step[inside], missing[inside], num_steps) > 0
    num_reqs = num_decode_tokens - counted
    kept = ~np.isnan(num_decode_tokens) & ~unknown & (num_reqs > 0)
    if not kept.any():
        return None
    depth = np.nan_to_num(trace.step("depth"))
    tokens = (num_reqs + gained)[kept].sum()
    total_ms = sum(
        prices.step_ms((num_reqs + counted)[kept & (depth == one)], int(one)).sum()
        for one in np.unique(depth[kept])
    )
    return float(1e3 * tokens / total_ms)
