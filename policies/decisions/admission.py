"""Which drafts a step verifies: by budget, by threshold, and within latency targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled
from policies.decisions.budget import find_budget
from policies.decisions.draft_costs import count_decodes
from policies.decisions.latency import latest_step_ms, reserve_drafts
from policies.decisions.select import admit_from, sum_prefixes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.decisions.draft_costs import DraftCosts
    from policies.types import DraftBatch


@dataclass(frozen=True, slots=True)
class DraftAdmission:
    """Says which drafts of a batch are verified.

    First what latency-bound requests need, then what is worth its time: argmax drafts
    by the budget with the largest surplus, sampled ones above a threshold that was
    fixed before they were drawn.

    Attributes:
        costs: Under the latest plan.
        latency_target_ms: Longest step, or None.
    """

    costs: DraftCosts
    latency_target_ms: float | None = None

    def admit(
        self,
        batch: DraftBatch,
        survival: NDArray[np.float64],
        weights: NDArray[np.float64] | None,
        explored: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], int]:
        """Count the drafts each request has verified.

        Args:
            batch: The drafts.
            survival: `[num_reqs, max_depth]`.
            weights: `[num_reqs]`, mean 1; None where all are alike.
            explored: Rows that verify a draft in any case, chosen without a look at the
                drafts; None in a step that does not explore.

        Returns:
            `[num_reqs]`, and how many more without any latency target.
        """
        values = survival if weights is None else survival * weights[:, None]
        reserved = reserve(batch, survival, self.costs)
        if batch.drafts_are_sampled:
            return admit_above_threshold(
                batch, values, reserved, self.costs, explored=explored
            )
        return admit_best(
            batch,
            survival,
            values,
            reserved,
            self.costs,
            latency_target_ms=self.latency_target_ms,
            explore=explored is not None,
        )


def reserve(
    batch: DraftBatch, survival: NDArray[np.float64], costs: DraftCosts
) -> NDArray[np.int64] | None:
    """Count what latency-bound requests get first, by what was known before.

    Returns:
        `[num_reqs]`; None if no request has a latency target.
    """
    if batch.latency_targets_ms is None:
        return None
    num_decodes = count_decodes(batch)
    width = costs.expect_width(num_decodes)
    ends = np.array([num_decodes, num_decodes + width / 2, num_decodes + width])
    plain_ms, usual_ms, wide_ms = costs.verify_ms(ends, batch.num_prefill_tokens)
    return reserve_drafts(
        survival,
        batch.num_draft_tokens,
        batch.latency_targets_ms,
        float(usual_ms) + costs.fixed_ms(batch),
        float(wide_ms - plain_ms) / width,
    )


def admit_above_threshold(
    batch: DraftBatch,
    values: NDArray[np.float64],
    reserved: NDArray[np.int64] | None,
    costs: DraftCosts,
    *,
    explored: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], int]:
    """Admit sampled drafts: what lies above a threshold fixed before they were drawn.

    A latency target raises the threshold to where the plan that holds it drew the line.

    Args:
        batch: The drafts.
        values: `[num_reqs, max_depth]`, survival times weight.
        reserved: `[num_reqs]`, admitted in any case, or None.
        costs: By the plan that was current when the block was drawn.
        explored: Rows whose first draft is verified in any case, chosen without a look
            at the drafts.

    Returns:
        `[num_reqs]`, and how many more without any latency target.
    """
    lengths, price = batch.num_draft_tokens, costs.token_price(count_decodes(batch))
    min_value = max(price, costs.plan.min_value)
    worthwhile: NDArray[np.int64] = (values >= min_value).sum(axis=1)
    if explored is not None:
        worthwhile[explored] = np.maximum(worthwhile[explored], 1)
    admitted = np.minimum(worthwhile, lengths)
    if reserved is not None:
        admitted = np.maximum(admitted, reserved)
    if min_value == price:
        return admitted, 0
    unlimited = np.minimum((values >= price).sum(axis=1), lengths)
    return admitted, int(np.maximum(unlimited - admitted, 0).sum())


def admit_best(
    batch: DraftBatch,
    survival: NDArray[np.float64],
    values: NDArray[np.float64],
    reserved: NDArray[np.int64] | None,
    costs: DraftCosts,
    *,
    latency_target_ms: float | None = None,
    explore: bool = False,
) -> tuple[NDArray[np.int64], int]:
    """Admit the best drafts of the batch, as many as are worth their time.

    Args:
        batch: The drafts.
        survival: `[num_reqs, max_depth]`.
        values: Same shape, survival times weight.
        reserved: `[num_reqs]`, admitted in any case, or None.
        costs: By the latest plan.
        latency_target_ms: Longest step, or None.
        explore: Verify a few drafts even if none is worth it.

    Returns:
        `[num_reqs]`, and how many more without any latency target.
    """
    lengths = batch.num_draft_tokens
    num_reserved = 0
    if reserved is not None:
        num_reserved = int(reserved.sum())
        values = np.where(
            np.arange(values.shape[1]) < reserved[:, None], np.inf, values
        )
    least = count_decodes(batch) + num_reserved
    num_open = int(lengths.sum()) - num_reserved
    step_ms = costs.verify_range_ms(least, num_open + 1, batch.num_prefill_tokens)

    def choose(max_step_ms: float) -> tuple[NDArray[np.int64], int]:
        tokens_per_ms = costs.plan.tokens_per_ms
        return _admit_best(
            values, lengths, num_reserved, step_ms, tokens_per_ms, max_step_ms, explore
        )

    room_ms = np.inf
    if latency_target_ms is not None:
        room_ms = latency_target_ms - costs.fixed_ms(batch)
    num_admitted, num_cut = choose(room_ms)
    targets_ms = batch.latency_targets_ms
    if reserved is None or targets_ms is None:
        return num_admitted, num_cut
    # Drafts of the others must not make a request miss its target; with its own
    # admitted drafts it bears longer steps.
    fixed_ms = costs.fixed_ms(batch)
    fastest_ms = fixed_ms + float(step_ms[0])
    chosen_ms = fixed_ms + float(step_ms[int(num_admitted.sum()) - num_reserved])
    tokens = 1.0 + sum_prefixes(survival, num_admitted)
    if chosen_ms <= latest_step_ms(tokens, targets_ms, fastest_ms):
        return num_admitted, num_cut
    tokens = 1.0 + sum_prefixes(survival, reserved)
    latest_ms = latest_step_ms(tokens, targets_ms, fastest_ms) - fixed_ms
    return choose(min(latest_ms, room_ms))


@compiled
def _admit_best(
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    num_reserved: int,
    step_ms: NDArray[np.float64],
    tokens_per_ms: float,
    max_step_ms: float,
    explore: bool,
) -> tuple[NDArray[np.int64], int]:
    """Put the drafts in order, find the budget, and admit what it pays for.

    Args:
        values: `[num_reqs, max_depth]`, non-increasing along a request; inf for what
            is admitted in any case.
        lengths: `[num_reqs]`.
        num_reserved: Drafts that are admitted in any case.
        step_ms: `[drafts that are not + 1]`, of the step with 0, 1, ... of these.
        tokens_per_ms: Price of a millisecond.
        max_step_ms: Latest `step_ms`; inf for no target.
        explore: Admit a quarter of all drafts at least.

    Returns:
        `[num_reqs]`, and how many more without a target.
    """
    num_drafts = num_reserved + step_ms.size - 1
    falling = np.empty(num_drafts)
    count = 0
    for row in range(lengths.size):
        for position in range(lengths[row]):
            falling[count] = -values[row, position]
            count += 1
    falling.sort()
    for index in range(num_drafts):
        falling[index] = -falling[index]
    budget, num_cut = find_budget(
        falling[num_reserved:], step_ms, tokens_per_ms, max_step_ms
    )
    if explore:
        budget, num_cut = max(budget, 1 + num_drafts // 4), 0
    num_admitted = min(num_reserved + budget, num_drafts)
    if num_admitted == 0:
        return np.zeros_like(lengths), num_cut
    least = falling[num_admitted - 1]
    return admit_from(values, lengths, least, num_admitted), num_cut
