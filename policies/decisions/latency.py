"""Drafts that latency-bound requests get before all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def find_within_reach(
    targets_ms: NDArray[np.float64],
    tokens_by_depth: NDArray[np.float64],
    plain_ms: float,
    ms_per_draft: float,
) -> NDArray[np.bool_]:
    """Tell which latency targets the requests' own drafts can keep.

    In a step of nothing but the drafts of those who need them, equally many each: of a
    request, and of those with looser targets. Who has a tighter one is given up first,
    as in `batch_value.value_batches`.

    Nothing here looks at a draft, so that whatever follows from it is lossless.

    Args:
        targets_ms: `[num_reqs]`, longest time per token wanted; inf for none.
        tokens_by_depth: `[depth + 1]`, tokens a step brings a request with so many
            drafts, as expected before they were drawn, >= 1.
        plain_ms: Time of a step that verifies none.
        ms_per_draft: What one more verified draft adds to it, >= 0.

    Returns:
        `[num_reqs]`; True where there is no target.
    """
    needing = np.sort(targets_ms[targets_ms < plain_ms])
    num_drafting = needing.size - np.searchsorted(needing, targets_ms)
    drafts_ms = np.arange(tokens_by_depth.size)[:, None] * ms_per_draft * num_drafting
    is_kept = tokens_by_depth[:, None] * targets_ms >= plain_ms + drafts_ms
    within: NDArray[np.bool_] = np.logical_or.reduce(is_kept, axis=0)
    return within


def reserve_drafts(
    survival: NDArray[np.float64],
    num_draft_tokens: NDArray[np.int64],
    targets_ms: NDArray[np.float64],
    step_ms: float,
    ms_per_draft: float,
) -> NDArray[np.int64]:
    """Count the drafts each request needs so as not to miss its latency target.

    A step of T ms that brings a request 1 + E tokens costs it T / (1 + E) ms a token.
    It reserves drafts, in order, while that is more than its target and the next draft
    lowers it: survival / (1 + E) above the draft's share of the step's time.

    Whether position j is reserved depends on survival up to j alone, so that
    this is lossless for sampled drafts too, given that `step_ms` was fixed before they
    were drawn.

    Args:
        survival: `[num_reqs, max_depth]`, 0-1, non-increasing along a request.
        num_draft_tokens: `[num_reqs]`, 0..max_depth.
        targets_ms: `[num_reqs]`, longest time per token wanted; inf for none.
        step_ms: Expected time of the step, > 0.
        ms_per_draft: What one more verified draft adds to it, >= 0.

    Returns:
        `[num_reqs]`, int64, 0..num_draft_tokens; 0 for requests without a target.

    Source: ours; two phases, first what latency needs and then what throughput gains,
    as in AdaServe (arXiv 2501.12162, section 4).
    """
    reserved = np.zeros(survival.shape[0], dtype=np.int64)
    bound = np.flatnonzero((step_ms > targets_ms) & (num_draft_tokens > 0))
    if bound.size == 0:
        return reserved
    own = survival[bound]
    tokens_before = 1.0 + np.cumsum(own, axis=1) - own
    wanted = tokens_before * targets_ms[bound, None] < step_ms
    wanted &= own * step_ms > ms_per_draft * tokens_before
    wanted &= np.arange(own.shape[1]) < num_draft_tokens[bound, None]
    reserved[bound] = np.logical_and.accumulate(wanted, axis=1).sum(axis=1)
    return reserved


def latest_step_ms(
    tokens: NDArray[np.float64], targets_ms: NDArray[np.float64], fastest_ms: float
) -> float:
    """Return how long a step may take before a request misses its target.

    A target that is out of reach even in the fastest step limits nobody: the others
    would lose without anyone's gain.

    Args:
        tokens: `[num_reqs]`, tokens each request may expect, >= 1.
        targets_ms: `[num_reqs]`, longest time per token wanted; inf for none.
        fastest_ms: The step with nothing but reserved drafts.

    Returns:
        Milliseconds; inf if nothing limits the step.
    """
    allowed = tokens * targets_ms
    within_reach = allowed[allowed >= fastest_ms]
    return float(within_reach.min(initial=np.inf))
