"""Which drafts a step verifies: by budget, by threshold, and within latency targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from policies.compiled import compiled
from policies.decisions.budget import find_budget
from policies.decisions.draft_costs import count_decodes
from policies.decisions.latency import (
    find_within_reach,
    latest_step_ms,
    reserve_drafts,
)
from policies.decisions.select import (
    admit_from,
    count_admitted,
    sum_prefixes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.decisions.draft_costs import DraftCosts
    from policies.types import DraftBatch

_NO_ROWS, _NO_WEIGHTS = np.empty(0, dtype=np.int64), np.empty(0)
"""What compiled loops take for None."""


class Admission(NamedTuple):
    """What is verified of a batch.

    Attributes:
        num_admitted: `[num_reqs]`, int64.
        num_late: How many more without any latency target.
        draft_budget: Drafts admitted.
        expected_accepted: How many of them may be expected accepted.
    """

    num_admitted: NDArray[np.int64]
    num_late: int
    draft_budget: int
    expected_accepted: float


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
        acceptance: NDArray[np.float64],
        weights: NDArray[np.float64] | None,
        explored: NDArray[np.int64] | None = None,
    ) -> Admission:
        """Count the drafts each request has verified.

        Args:
            batch: The drafts.
            acceptance: `[num_reqs, depth]`, C-contiguous, given that everything before
                was accepted; depth at least that of the longest draft.
            weights: `[num_reqs]`, mean 1; None where all are alike.
            explored: Rows that verify a draft in any case, chosen without a look at the
                drafts; None in a step that does not explore.
        """
        weights = _NO_WEIGHTS if weights is None else weights
        reserved = reserve(batch, acceptance, self.costs)
        if batch.drafts_are_sampled:
            return _above_threshold(
                batch, acceptance, weights, reserved, self.costs, explored
            )
        return _best(
            batch,
            acceptance,
            weights,
            reserved,
            self.costs,
            latency_target_ms=self.latency_target_ms,
            explore=explored is not None,
        )


def reserve(
    batch: DraftBatch, acceptance: NDArray[np.float64], costs: DraftCosts
) -> NDArray[np.int64]:
    """Count what latency-bound requests get first, by what was known before.

    One whose target is out of reach gets nothing first: it would be in vain.

    Returns:
        `[num_reqs]`; empty if no request has a latency target.
    """
    targets_ms = batch.latency_targets_ms
    if targets_ms is None:
        return _NO_ROWS
    num_decodes = count_decodes(batch)
    width = costs.expect_width(num_decodes)
    # The last without prompts: they come and go, and a target is of the average.
    ends = np.array([1.0, 1.0 + width / 2, 1.0 + width, 1.0])
    prompts = batch.num_prefill_tokens * np.array([1.0, 1.0, 1.0, 0.0])
    first_ms, usual_ms, wide_ms, bare_ms = costs.verify_ms(num_decodes, ends, prompts)
    fixed_ms = costs.fixed_ms(batch)
    ms_per_draft = float(wide_ms - first_ms) / width
    within_reach = find_within_reach(
        targets_ms,
        np.array(costs.plan.tokens_by_depth),
        float(bare_ms) - ms_per_draft + fixed_ms,
        ms_per_draft,
    )
    return reserve_drafts(
        acceptance.cumprod(axis=1),
        batch.num_draft_tokens,
        np.where(within_reach, targets_ms, np.inf),
        float(usual_ms) + fixed_ms,
        ms_per_draft,
    )


def _above_threshold(
    batch: DraftBatch,
    acceptance: NDArray[np.float64],
    weights: NDArray[np.float64],
    reserved: NDArray[np.int64],
    costs: DraftCosts,
    explored: NDArray[np.int64] | None,
) -> Admission:
    """Admit sampled drafts: what lies above a threshold fixed before they were drawn.

    By the plan that was current when the block was drawn. A latency target raises the
    threshold to where the plan that holds it drew the line.
    """
    price = costs.token_price(count_decodes(batch))
    return Admission(
        *_admit_above(
            acceptance,
            weights,
            batch.num_draft_tokens,
            reserved,
            _NO_ROWS if explored is None else explored,
            price,
            max(price, costs.plan.min_value),
        )
    )


def _best(
    batch: DraftBatch,
    acceptance: NDArray[np.float64],
    weights: NDArray[np.float64],
    reserved: NDArray[np.int64],
    costs: DraftCosts,
    *,
    latency_target_ms: float | None,
    explore: bool,
) -> Admission:
    """Admit the best drafts of the batch, as many as are worth their time."""
    num_reserved = int(reserved.sum()) if reserved.size else 0
    # Of as many as there could be: to count those there are takes longer.
    step_ms = costs.verify_range_ms(
        count_decodes(batch),
        num_reserved,
        acceptance.size - num_reserved + 1,
        batch.num_prefill_tokens,
    )

    def choose(max_step_ms: float) -> Admission:
        return Admission(
            *_admit_best(
                acceptance,
                weights,
                batch.num_draft_tokens,
                reserved,
                step_ms,
                costs.plan.tokens_per_ms,
                max_step_ms,
                explore,
            )
        )

    room_ms = np.inf
    if latency_target_ms is not None:
        room_ms = latency_target_ms - costs.fixed_ms(batch)
    admission = choose(room_ms)
    targets_ms = batch.latency_targets_ms
    if targets_ms is None:
        return admission
    # Drafts of the others must not make a request miss its target; with its own
    # admitted drafts it bears longer steps.
    survival = acceptance.cumprod(axis=1)
    fixed_ms = costs.fixed_ms(batch)
    fastest_ms = fixed_ms + float(step_ms[0])
    chosen_ms = fixed_ms + float(step_ms[admission.draft_budget - num_reserved])
    tokens = 1.0 + sum_prefixes(survival, admission.num_admitted)
    if chosen_ms <= latest_step_ms(tokens, targets_ms, fastest_ms):
        return admission
    tokens = 1.0 + sum_prefixes(survival, reserved)
    latest_ms = latest_step_ms(tokens, targets_ms, fastest_ms) - fixed_ms
    return choose(min(latest_ms, room_ms))


@compiled
def _survive(acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the running products along each request."""
    survival = np.empty(acceptance.shape)
    for row in range(acceptance.shape[0]):
        left = 1.0
        for position in range(acceptance.shape[1]):
            left *= acceptance[row, position]
            survival[row, position] = left
    return survival


@compiled
def _admit_above(
    acceptance: NDArray[np.float64],
    weights: NDArray[np.float64],
    lengths: NDArray[np.int64],
    reserved: NDArray[np.int64],
    explored: NDArray[np.int64],
    price: float,
    min_value: float,
) -> tuple[NDArray[np.int64], int, int, float]:
    """Admit what is worth at least so much, without a look at what comes after it.

    Args:
        acceptance: As in `DraftAdmission.admit`.
        weights: `[num_reqs]`; empty where all are alike.
        lengths: `[num_reqs]`.
        reserved: `[num_reqs]`, admitted in any case; empty for none.
        explored: Rows whose first draft is admitted in any case.
        price: Worth of a draft that pays for its time.
        min_value: Worth of a draft that is admitted, >= `price`.

    Returns:
        As `Admission`.
    """
    survival = _survive(acceptance)
    admitted = np.zeros_like(lengths)
    unlimited = np.zeros_like(lengths)
    for row in range(lengths.size):
        weight = weights[row] if weights.size > 0 else 1.0
        for position in range(survival.shape[1]):
            value = survival[row, position] * weight
            admitted[row] += value >= min_value
            unlimited[row] += value >= price
    for row in explored:
        admitted[row] = max(admitted[row], 1)
    num_late = 0
    for row in range(lengths.size):
        admitted[row] = min(admitted[row], lengths[row])
        if reserved.size > 0:
            admitted[row] = max(admitted[row], reserved[row])
        if min_value != price:
            num_late += max(min(unlimited[row], lengths[row]) - admitted[row], 0)
    draft_budget, expected = count_admitted(survival, admitted)
    return admitted, num_late, draft_budget, expected


@compiled
def _admit_best(
    acceptance: NDArray[np.float64],
    weights: NDArray[np.float64],
    lengths: NDArray[np.int64],
    reserved: NDArray[np.int64],
    step_ms: NDArray[np.float64],
    tokens_per_ms: float,
    max_step_ms: float,
    explore: bool,
) -> tuple[NDArray[np.int64], int, int, float]:
    """Put the drafts in order, find the budget, and admit what it pays for.

    Args:
        acceptance: As in `DraftAdmission.admit`.
        weights: `[num_reqs]`; empty where all are alike.
        lengths: `[num_reqs]`.
        reserved: `[num_reqs]`, admitted in any case; empty for none.
        step_ms: `[>= drafts that are not + 1]`, of the step with 0, 1, ... of these.
        tokens_per_ms: Price of a millisecond.
        max_step_ms: Latest `step_ms`; inf for no target.
        explore: Admit a quarter of all drafts at least.

    Returns:
        As `Admission`.
    """
    survival = _survive(acceptance)
    values = np.empty(survival.shape)
    falling = np.empty(survival.size)
    num_drafts = num_reserved = 0
    for row in range(lengths.size):
        weight = weights[row] if weights.size > 0 else 1.0
        num_kept = reserved[row] if reserved.size > 0 else 0
        num_reserved += num_kept
        for position in range(lengths[row]):
            value = survival[row, position] * weight if position >= num_kept else np.inf
            values[row, position] = value
            falling[num_drafts] = -value
            num_drafts += 1
    falling = falling[:num_drafts]
    falling.sort()
    for index in range(num_drafts):
        falling[index] = -falling[index]
    budget, num_cut = find_budget(
        falling[num_reserved:],
        step_ms[: num_drafts - num_reserved + 1],
        tokens_per_ms,
        max_step_ms,
    )
    if explore:
        budget, num_cut = max(budget, 1 + num_drafts // 4), 0
    num_admitted = min(num_reserved + budget, num_drafts)
    admitted = np.zeros_like(lengths)
    if num_admitted > 0:
        admitted = admit_from(values, lengths, falling[num_admitted - 1], num_admitted)
    draft_budget, expected = count_admitted(survival, admitted)
    return admitted, num_cut, draft_budget, expected
