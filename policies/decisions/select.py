"""TETRIS draft selection: which draft tokens of the whole batch are verified.

The paper's *capacity* is called `draft_budget` here, the field's word for the number
of draft tokens one step may verify.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDING = 1e-6
"""By which a softmax in float32 may exceed 1."""


def compute_survival(acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn acceptance probabilities into survival probabilities.

    A draft token survives verification only if it and every token before it are
    accepted, so survival is the running product along a request.

    Args:
        acceptance: `[num_reqs, max_depth]`, float64, 0-1. NaN means unknown and
            counts as 0, so the position and all after it rank last.

    Returns:
        `[num_reqs, max_depth]`, float64, non-increasing along a request.

    Source: arXiv 2502.15197, section 4 (cumulative product of draft probabilities).
    """
    clean = np.nan_to_num(acceptance, nan=0.0, posinf=1.0, neginf=0.0)
    survival: NDArray[np.float64] = np.clip(clean, 0.0, 1.0).cumprod(axis=1)
    return survival


def select_drafts(
    survival: NDArray[np.float64],
    num_draft_tokens: NDArray[np.int64],
    draft_budget: int,
) -> NDArray[np.int64]:
    """Admit the `draft_budget` drafts of the batch most likely to survive.

    Survival never rises along a request, so the best tokens overall form a prefix of
    every request and greedy selection is optimal. Exactly `draft_budget` tokens are
    admitted when that many drafts exist, all of them otherwise, even at survival 0.

    Whether position `j` is admitted depends on survival up to `j` of its own request
    and on other requests, never on later positions of its own: ties go to the
    shallower position first, then to the request with the lower index. Output stays
    exactly distributed as the target's when survival itself is non-anticipating.

    Args:
        survival: `[num_reqs, max_depth]`, any float dtype, 0-1. A rise along a
            request is flattened to the running minimum; NaN counts as 0.
        num_draft_tokens: `[num_reqs]`, integer, 0..max_depth. Ragged lengths; columns
            at or past a request's length are ignored.
        draft_budget: Draft tokens that may be verified. >= 0.

    Returns:
        `[num_reqs]`, int64. Admitted drafts per request; empty for an empty batch.

    Raises:
        ValueError: If shapes disagree, a length is outside 0..max_depth, or the
            budget is negative.

    Complexity: O(num_reqs * max_depth) on average (one partition, no sort).

    Source: arXiv 2502.15197, section 4 and theorem 1; tie-breaking is ours.
    """
    _validate(survival, num_draft_tokens, draft_budget)
    lengths = num_draft_tokens.astype(np.int64)
    num_drafts = int(lengths.sum())
    if draft_budget >= num_drafts:
        return lengths
    if draft_budget == 0:
        return np.zeros_like(lengths)
    scores = np.array(survival, dtype=np.float64, order="C")
    present = gather_scores(scores, lengths)
    cut = num_drafts - draft_budget
    return admit_from(scores, lengths, np.partition(present, cut)[cut], draft_budget)


@compiled
def gather_scores(
    scores: NDArray[np.float64], lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Flatten rises along a request, count NaN as 0, and list the drafts there are.

    Args:
        scores: `[num_reqs, max_depth]`, changed in place up to the lengths.
        lengths: `[num_reqs]`, 0..max_depth.

    Returns:
        `[sum of lengths]`, row by row.
    """
    present = np.empty(lengths.sum())
    count = 0
    for row in range(lengths.size):
        lowest = np.inf
        for position in range(lengths[row]):
            value = scores[row, position]
            # A comparison with NaN is false, which leaves 0.
            lowest = min(lowest, value if value > 0.0 else 0.0)
            scores[row, position] = present[count] = lowest
            count += 1
    return present


@compiled
def admit_from(
    scores: NDArray[np.float64],
    lengths: NDArray[np.int64],
    least: float,
    draft_budget: int,
) -> NDArray[np.int64]:
    """Admit what scores more than `least`, and of what equals it as much as there is.

    Args:
        scores: `[num_reqs, max_depth]`, non-increasing along a request.
        lengths: `[num_reqs]`, 0..max_depth; what lies past them is not there.
        least: Score of the last draft that the budget pays for.
        draft_budget: Drafts to admit, no fewer than score more than `least`.

    Returns:
        `[num_reqs]`, int64.
    """
    admitted = np.zeros_like(lengths)
    num_left = draft_budget
    for row in range(lengths.size):
        for position in range(lengths[row]):
            if scores[row, position] <= least:
                break
            admitted[row] += 1
            num_left -= 1
    for position in range(scores.shape[1]):
        for row in range(lengths.size):
            if num_left == 0:
                return admitted
            # Whoever has an equal score before this one has had it admitted already.
            is_next = admitted[row] == position and position < lengths[row]
            if is_next and scores[row, position] == least:
                admitted[row] += 1
                num_left -= 1
    return admitted


@compiled
def sum_prefixes(
    survival: NDArray[np.float64], lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Sum the first survivals of every request: the drafts it may expect accepted.

    Args:
        survival: `[num_reqs, max_depth]`.
        lengths: `[num_reqs]`, 0..max_depth, how many of each count.

    Returns:
        `[num_reqs]`, float64.
    """
    totals = np.zeros(lengths.size)
    for row in range(lengths.size):
        for position in range(lengths[row]):
            totals[row] += survival[row, position]
    return totals


@compiled
def blank_past(
    confidence: NDArray[np.float64], num_draft_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Put 0 past what each request offers, and tell whose rest are probabilities.

    Args:
        confidence: `[num_reqs, depth]`; what is past 1 by rounding alone becomes 1.
        num_draft_tokens: `[num_reqs]`, 0..depth.

    Returns:
        A copy, and `[num_reqs]`, whether a request has only values within 0-1.
    """
    blanked = np.zeros(confidence.shape)
    is_usable = np.ones(num_draft_tokens.size, np.bool_)
    for row in range(num_draft_tokens.size):
        # No further than there is anything: compiled loops do not look where they read.
        for position in range(min(num_draft_tokens[row], confidence.shape[1])):
            value = confidence[row, position]
            # Nothing compares with NaN.
            if not 0.0 <= value <= 1.0 + ROUNDING:
                is_usable[row] = False
            blanked[row, position] = 1.0 if value > 1.0 else value
    return blanked, is_usable


@compiled
def count_admitted(
    survival: NDArray[np.float64], num_admitted: NDArray[np.int64]
) -> tuple[int, float]:
    """Count the admitted drafts, and how many of them may be expected accepted.

    Args:
        survival: `[num_reqs, max_depth]`.
        num_admitted: `[num_reqs]`, 0..max_depth.
    """
    return num_admitted.sum(), sum_prefixes(survival, num_admitted).sum()


def _validate(
    survival: NDArray[np.float64],
    num_draft_tokens: NDArray[np.int64],
    draft_budget: int,
) -> None:
    if survival.ndim != 2:
        raise ValueError(
            f"survival must be [num_reqs, max_depth], got shape {survival.shape}"
        )
    if num_draft_tokens.shape != survival.shape[:1]:
        raise ValueError(
            "num_draft_tokens must hold one length per request: got shape "
            f"{num_draft_tokens.shape} for {survival.shape[0]} requests"
        )
    if draft_budget < 0:
        raise ValueError(f"draft_budget must be >= 0, got {draft_budget}")
    if num_draft_tokens.size and (
        num_draft_tokens.min() < 0 or num_draft_tokens.max() > survival.shape[1]
    ):
        raise ValueError(
            f"num_draft_tokens must lie in 0..{survival.shape[1]} (the columns of "
            f"survival), got {num_draft_tokens.min()}..{num_draft_tokens.max()}"
        )
