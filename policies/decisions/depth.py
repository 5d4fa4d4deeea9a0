"""How deep to draft: the depth whose best budget promises the most goodput.

The plan's goodput is also the price of a millisecond, which the draft budget goes by
(see `budget`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_THRESHOLDS = 32
"""Survival thresholds compared per depth."""


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """What the coming steps are expected to look like at the chosen depth.

    Attributes:
        depth: Draft tokens per request.
        tokens_per_ms: Expected goodput, the price of a millisecond in tokens; without
            the time of prompts, which every token has its share of.
        budget_per_req: Drafts verified per request at that goodput.
        gain: That goodput over the one that depth 0 promises.
        rate: Tokens per millisecond that come beside the usual prompts.
        min_value: Survival times weight below which a latency target leaves no room
            for a draft; 0 where none limits the plan.
        tokens_by_depth: Tokens a step brings a request all of whose drafts are
            verified, were it 0, 1, ... `depth` deep.
    """

    depth: int
    tokens_per_ms: float
    budget_per_req: float
    gain: float = 1.0
    rate: float = 0.0
    min_value: float = 0.0
    tokens_by_depth: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, slots=True)
class DepthEstimate:
    """Expected tokens and drafts per request, by depth and survival threshold.

    Attributes:
        gained: `[max_depth + 1, num_thresholds]`, accepted drafts per request, by
            weight, when everything above the threshold is verified; column 0 verifies
            nothing.
        verified: Same shape, drafts verified per request.
        thresholds: `[num_thresholds]`, falling, survival times weight that a draft of
            a column has at least; inf where nothing is verified.
    """

    gained: NDArray[np.float64]
    verified: NDArray[np.float64]
    thresholds: NDArray[np.float64]

    @property
    def tokens_in_full(self) -> NDArray[np.float64]:
        """Tokens per step of a request all of whose drafts are verified, by depth.

        `[max_depth + 1]`, the bonus token included.
        """
        # The last threshold lets everything through.
        return 1.0 + self.gained[:, -1]


def estimate_depths(
    acceptance: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> DepthEstimate:
    """Let recent drafts stand for the next ones, at every depth.

    Args:
        acceptance: `[num_drafts, max_depth]`, 0-1, of recent drafts, >= 1 row.
        weights: `[num_drafts]`, what a token of each is worth; mean 1. None for all
            the same.

    Complexity: one sort of all survivals; every depth reads the same order.
    """
    values: NDArray[np.float64] = acceptance.cumprod(axis=1)
    if weights is not None:
        values *= weights[:, None]
    survival = values.ravel()
    return DepthEstimate(
        *add_up_drafts(
            survival, np.argsort(-survival), acceptance.shape[1], NUM_THRESHOLDS
        )
    )


@compiled
def add_up_drafts(
    survival: NDArray[np.float64],
    order: NDArray[np.int64],
    max_depth: int,
    num_thresholds: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Sum drafts from the best on, for every depth, and note evenly spaced sums.

    Args:
        survival: `[num_drafts * max_depth]`, row by row.
        order: `[num_drafts * max_depth]`, places in it, by falling survival.
        max_depth: Positions of a draft.
        num_thresholds: Sums to note.

    Returns:
        As `DepthEstimate`.
    """
    num_drafts = survival.size // max_depth
    gained = np.zeros((max_depth + 1, num_thresholds + 1))
    verified = np.zeros((max_depth + 1, num_thresholds + 1))
    thresholds = np.full(num_thresholds + 1, np.inf)
    num_gained = np.zeros(max_depth + 1)
    num_verified = np.zeros(max_depth + 1)
    noted = 0
    for rank in range(order.size):
        value = survival[order[rank]]
        for depth in range(order[rank] % max_depth + 1, max_depth + 1):
            num_gained[depth] += value
            num_verified[depth] += 1.0
        while (
            noted < num_thresholds
            and noted * (order.size - 1) // (num_thresholds - 1) == rank
        ):
            noted += 1
            thresholds[noted] = value
            for depth in range(max_depth + 1):
                gained[depth, noted] = num_gained[depth] / num_drafts
                verified[depth, noted] = num_verified[depth] / num_drafts
    return gained, verified, thresholds


def plan_depth(
    estimate: DepthEstimate,
    step_ms: NDArray[np.float64],
    num_reqs: int,
    current: int,
    *,
    keep_gain: float = 1.0,
    max_step_ms: float | NDArray[np.float64] | None = None,
    prompt_ms: float = 0.0,
) -> DepthPlan:
    """Choose the depth whose best threshold has the largest goodput.

    Args:
        estimate: From `estimate_depths`.
        step_ms: Same shape as the estimate's arrays, > 0, the whole step.
        num_reqs: Requests that decode.
        current: The depth now, which keeps its place unless another promises
            `keep_gain` times as much.
        keep_gain: >= 1.
        max_step_ms: Latency target, one for all or of a shape that broadcasts to that
            of `step_ms`; combinations that miss it count only if none meets it.
        prompt_ms: What the usual prompts take besides.

    Returns:
        The plan; among equals the smaller depth.
    """
    goodput = unlimited = num_reqs * (1.0 + estimate.gained) / step_ms
    if max_step_ms is not None:
        meets = step_ms <= max_step_ms
        if meets.any():
            goodput = np.where(meets, goodput, 0.0)
    depth, point = find_depth(goodput, current, keep_gain)
    is_limited = int(np.argmax(unlimited[depth])) > point
    tokens_per_ms, bare_ms = (
        float(unlimited[depth, point]),
        float(step_ms[depth, point]),
    )
    return DepthPlan(
        depth=depth,
        tokens_per_ms=tokens_per_ms,
        budget_per_req=float(estimate.verified[depth, point]),
        gain=tokens_per_ms / float(unlimited[0, 0]),
        rate=tokens_per_ms * bare_ms / (bare_ms + prompt_ms),
        min_value=float(estimate.thresholds[point]) if is_limited else 0.0,
        tokens_by_depth=tuple(estimate.tokens_in_full[: depth + 1].tolist()),
    )


@compiled
def find_depth(
    goodput: NDArray[np.float64], current: int, keep_gain: float
) -> tuple[int, int]:
    """Return the depth with the largest goodput, and its best threshold's column.

    Args:
        goodput: `[max_depth + 1, num_thresholds + 1]`, >= 0.
        current: The depth now, which needs `1 / keep_gain` of the best to stay.
        keep_gain: >= 1.
    """
    best, best_column, kept_column = 0, 0, 0
    for depth in range(goodput.shape[0]):
        column = 0
        for other in range(1, goodput.shape[1]):
            if goodput[depth, other] > goodput[depth, column]:
                column = other
        if depth == current:
            kept_column = column
        if goodput[depth, column] > goodput[best, best_column]:
            best, best_column = depth, column
    if goodput[best, best_column] < keep_gain * goodput[current, kept_column]:
        return current, kept_column
    return best, best_column
