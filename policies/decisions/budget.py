"""How many drafts to verify and how deep to draft.

    goodput = (one token per decoding request + expected accepted drafts) / step time

Long-run throughput is a ratio of expectations. A policy that maximises such a ratio
maximises, in every single step, tokens minus time priced at the ratio itself (renewal
reward): the depth plan finds the ratio, the draft budget uses it as a price.
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
class BudgetChoice:
    """How many drafts to verify.

    Attributes:
        draft_budget: Draft tokens to verify.
        num_cut_by_latency: Draft tokens more without the latency target.
    """

    draft_budget: int
    num_cut_by_latency: int = 0


def choose_draft_budget(
    candidates: NDArray[np.float64],
    step_ms: NDArray[np.float64],
    tokens_per_ms: float,
    *,
    max_step_ms: float | None = None,
) -> BudgetChoice:
    """Choose the budget with the largest surplus: tokens minus priced time.

    All budgets are compared, not only up to the first fall: where the engine pads,
    cost is a staircase, the first token of a stair never pays and the next ones are
    free. It looks at every candidate, so it is for argmax drafts and one-hot
    verification; sampled drafts take `survival_threshold`.

    Args:
        candidates: `[num_drafts]`, >= 0, survival times weight of every draft, largest
            first.
        step_ms: `[num_drafts + 1]`, what the step costs when 0, 1, ... are verified;
            a constant offset changes nothing.
        tokens_per_ms: Price of a millisecond in tokens, >= 0.
        max_step_ms: Latest `step_ms` that meets the latency target, or None.

    Returns:
        The choice; among equals the smallest budget, 0 if no budget meets the target.

    Raises:
        ValueError: If `step_ms` does not have one entry more than `candidates`.

    Source: ours.
    """
    if step_ms.shape != (candidates.size + 1,):
        raise ValueError(
            f"step_ms must price 0..{candidates.size} drafts, got shape {step_ms.shape}"
        )
    limit_ms = np.inf if max_step_ms is None else max_step_ms
    return BudgetChoice(*find_budget(candidates, step_ms, tokens_per_ms, limit_ms))


@compiled
def find_budget(
    candidates: NDArray[np.float64],
    step_ms: NDArray[np.float64],
    tokens_per_ms: float,
    max_step_ms: float,
) -> tuple[int, int]:
    """Do what `choose_draft_budget` does, without its checks; inf for no target."""
    best = limited = 0
    most = most_limited = -np.inf
    tokens = 0.0
    for budget in range(step_ms.size):
        if budget > 0:
            tokens += candidates[budget - 1]
        surplus = tokens - tokens_per_ms * step_ms[budget]
        if surplus > most:
            most, best = surplus, budget
        if step_ms[budget] <= max_step_ms and surplus > most_limited:
            most_limited, limited = surplus, budget
    return limited, max(0, best - limited)


def survival_threshold(
    step_ms: NDArray[np.float64], width: float, tokens_per_ms: float
) -> float:
    """Return the survival at which verifying a draft pays for its time.

    The marginal price is the slope over a whole stretch of budgets: the concave
    envelope of a staircase rather than its next stair. Fixed before a block is drawn,
    it admits a draft by what is known before its token, whatever the others are.

    Args:
        step_ms: `[2]`, step cost with nothing and with `width` drafts verified.
        width: Drafts between the two, > 0.
        tokens_per_ms: Price of a millisecond in tokens.

    Source: ours.
    """
    return float(tokens_per_ms * (step_ms[1] - step_ms[0]) / width)


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """What the coming steps are expected to look like at the chosen depth.

    Attributes:
        depth: Draft tokens per request.
        tokens_per_ms: Expected goodput, the price of a millisecond in tokens.
        budget_per_req: Drafts verified per request at that goodput.
        least_value: Survival times weight below which a latency target leaves no room
            for a draft; 0 where none limits the plan.
    """

    depth: int
    tokens_per_ms: float
    budget_per_req: float
    least_value: float = 0.0


@dataclass(frozen=True, slots=True)
class DepthOutlook:
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


def foresee_depths(
    acceptance: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> DepthOutlook:
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
    return DepthOutlook(
        *_add_up(survival, np.argsort(-survival), acceptance.shape[1], NUM_THRESHOLDS)
    )


@compiled
def _add_up(
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
        As `DepthOutlook`.
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
    outlook: DepthOutlook,
    step_ms: NDArray[np.float64],
    num_reqs: int,
    current: int,
    *,
    keep_gain: float = 1.0,
    max_step_ms: float | NDArray[np.float64] | None = None,
) -> DepthPlan:
    """Choose the depth whose best threshold has the largest goodput.

    Args:
        outlook: From `foresee_depths`.
        step_ms: Same shape as the outlook's arrays, > 0, the whole step.
        num_reqs: Requests that decode.
        current: The depth now, which keeps its place unless another promises
            `keep_gain` times as much.
        keep_gain: >= 1.
        max_step_ms: Latency target, one for all or of a shape that broadcasts to that
            of `step_ms`; combinations that miss it count only if none meets it.

    Returns:
        The plan; among equals the smaller depth.
    """
    goodput = unlimited = num_reqs * (1.0 + outlook.gained) / step_ms
    if max_step_ms is not None:
        meets = step_ms <= max_step_ms
        if meets.any():
            goodput = np.where(meets, goodput, 0.0)
    best_point = np.argmax(goodput, axis=1)
    by_depth = goodput[np.arange(goodput.shape[0]), best_point]
    depth = int(np.argmax(by_depth))
    if by_depth[depth] < keep_gain * by_depth[current]:
        depth = current
    point = int(best_point[depth])
    is_limited = int(np.argmax(unlimited[depth])) > point
    return DepthPlan(
        depth=depth,
        tokens_per_ms=float(by_depth[depth]),
        budget_per_req=float(outlook.verified[depth, point]),
        least_value=float(outlook.thresholds[point]) if is_limited else 0.0,
    )
