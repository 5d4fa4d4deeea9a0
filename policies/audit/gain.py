"""From sums and blocks to the gain, with an interval that holds while all drifts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.audit.ledger import bucket_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from policies.audit.block import BlockResult
    from policies.audit.ledger import LoadSums

MIN_BLOCKS = 32
"""Fewer tell nothing: neither the gain nor how wrong it may be."""

MIN_COVER = 0.8
"""Share of the time that must be at loads of which there are blocks."""

_NORMAL = 1.959964
"""Of a normal distribution 95 % lies within so many standard deviations."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times the tokens per second of another policy.

    Attributes:
        ratio: The estimate.
        lower: End of its 95 % interval.
        upper: The other end.
    """

    ratio: float
    lower: float
    upper: float


def estimate_gain(
    loads: Mapping[int, LoadSums],
    blocks: Sequence[BlockResult],
    *,
    rest_counts: bool,
) -> Gain | None:
    """Divide the time that the same work would have taken by the time that it took.

    The work is what the policy's steps did: tokens of decoding requests, and prompts.
    At each load, with sums over blocks and over the policy's steps around them,

        time per token of the arm = time of the policy's steps
            * (block's ms / neighbours' ms) / (block's tokens per step)

    which cancels what drifts for both: a ratio of sums, not a mean of ratios. Prompts
    take what they took, but for the drafter's pass over them.

    The variance is that of the linearised ratio, block by block in the order of time,
    with Bartlett weights for what neighbouring blocks have in common (Newey and West
    1987); the quantile is Student's.

    Args:
        loads: Sums by class of load.
        blocks: Of one arm, in the order of time.
        rest_counts: Whether a step in which the policy rests is a step of the arm, as
            is so for `none`. Else such steps are left out.

    Returns:
        The gain; None where it cannot be told yet.
    """
    if len(blocks) < MIN_BLOCKS:
        return None
    buckets = np.array([bucket_of(one.num_reqs) for one in blocks])
    columns = np.array(
        [(b.ms, b.num_steps * b.near_ms, b.num_steps, b.tokens) for b in blocks]
    ).T
    influence = np.zeros(len(blocks))
    needed_ms = spent_ms = left_out_ms = 0.0
    for bucket, sums in loads.items():
        rest_ms = sums.rest_ms if rest_counts else 0.0
        own = buckets == bucket
        decode_ms, prompt_ms = _split(sums)
        if decode_ms is None:
            left_out_ms += sums.speculating_ms
        elif own.any():
            parts = [one[own] / one[own].sum() for one in columns]
            ms, near_ms, num_steps, tokens = columns[:, own].sum(axis=1).tolist()
            tokens_per_step = sums.tokens / (sums.num_pure + sums.num_mixed)
            arm_ms = decode_ms * tokens_per_step * ms / near_ms * num_steps / tokens
            influence[own] = arm_ms * (parts[0] - parts[1] + parts[2] - parts[3])
            needed_ms += arm_ms + prompt_ms
            spent_ms += sums.speculating_ms
        elif rest_counts and sums.num_rest_pure:
            # The policy rests, and tries drafting now and then.
            arm_ms = sums.tokens * sums.rest_pure_ms / sums.num_rest_pure
            needed_ms += arm_ms + prompt_ms
            spent_ms += sums.speculating_ms
        else:
            left_out_ms += sums.speculating_ms
        needed_ms += rest_ms
        spent_ms += rest_ms
    if spent_ms < MIN_COVER * (spent_ms + left_out_ms) or spent_ms <= 0.0:
        return None
    ratio = needed_ms / spent_ms
    freedom = len(blocks) - len(set(buckets.tolist()))
    half = _student(freedom) * math.sqrt(_variance_of_sum(influence)) / spent_ms
    return Gain(ratio, ratio - half, ratio + half)


def estimate_cost(loads: Mapping[int, LoadSums]) -> float:
    """Return the share of all time that the policy would have saved in audits."""
    lost_ms = total_ms = 0.0
    for sums in loads.values():
        total_ms += sums.speculating_ms + sums.rest_ms + sums.audited_ms
        if sums.tokens:
            own_ms = sums.audited_tokens * sums.speculating_ms / sums.tokens
            lost_ms += sums.audited_ms - own_ms
    return lost_ms / total_ms if total_ms else 0.0


def _split(sums: LoadSums) -> tuple[float | None, float]:
    """Return the time of decoding, and what prompts would take without a drafter.

    None where no pure step tells them apart.
    """
    if not sums.num_pure:
        return None, 0.0
    decode_ms = sums.pure_ms * (1.0 + sums.num_mixed / sums.num_pure)
    decode_target_ms = sums.pure_target_ms * sums.num_mixed / sums.num_pure
    return decode_ms, sums.mixed_target_ms - decode_target_ms


def _variance_of_sum(influence: NDArray[np.float64]) -> float:
    """Return the variance of a sum whose terms depend on those before them."""
    num = influence.size
    own = float(influence @ influence)
    variance, num_lags = own, int(num ** (1.0 / 3.0))
    for lag in range(1, num_lags + 1):
        weight = 1.0 - lag / (num_lags + 1.0)
        variance += 2.0 * weight * float(influence[:-lag] @ influence[lag:])
    return max(variance, 0.5 * own) * num / (num - 1.0)


def _student(freedom: int) -> float:
    """Return Student's quantile for 95 % (Cornish and Fisher's expansion)."""
    z = _NORMAL
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2
