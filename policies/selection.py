"""TETRIS draft selection: which draft tokens of the whole batch are verified.

The paper's *capacity* is called `draft_budget` here, the field's word for the number
of draft tokens one step may verify.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


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

    max_depth = survival.shape[1]
    # NaN becomes 0: fmax takes the number of the two.
    scores = np.fmax(survival, 0.0)
    np.minimum.accumulate(scores, axis=1, out=scores)
    # Absent drafts rank below every real one, whose scores are >= 0.
    scores[np.arange(max_depth) >= lengths[:, None]] = -1.0

    flat = scores.ravel()
    threshold = np.partition(flat, flat.size - draft_budget)[-draft_budget]
    reaching: NDArray[np.int64] = (scores >= threshold).sum(axis=1, dtype=np.int64)
    if int(reaching.sum()) == draft_budget:
        return reaching
    above: NDArray[np.int64] = (scores > threshold).sum(axis=1, dtype=np.int64)
    num_tied_admitted = draft_budget - int(above.sum())
    # Transposed, so that ties are met position by position and then by request.
    tied_reqs = np.nonzero((scores == threshold).T)[1][:num_tied_admitted]
    return above + np.bincount(tied_reqs, minlength=above.size)


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
    kept = np.arange(survival.shape[1]) < lengths[:, None]
    total: NDArray[np.float64] = (survival * kept).sum(axis=1)
    return total


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
