"""From sums and blocks to the gain, with an interval that holds while all drifts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from policies.audit.block import Arm
from policies.audit.ledger import LoadSums, bucket_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from policies.audit.block import BlockResult

MIN_BLOCKS = 16
"""Fewer tell nothing: neither the gain nor how wrong it may be."""

MIN_COVER = 0.8
"""Share of the time that must be at loads of which there are blocks."""

MIN_BATCHES, MAX_BATCHES = 5, 16
"""Of blocks, about as many as blocks in each."""

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
    drafts: bool = False,
    min_blocks: int = MIN_BLOCKS,
) -> Gain | None:
    """Divide the time that the same work would have taken by the time that it took.

    The work is what the policy's steps did: tokens of decoding requests, and prompts.
    At each load,

        time of the arm = tokens emitted * (ms of blocks / tokens of blocks) / pace

    with sums over blocks, and the pace of the engine around them: what the target's
    passes of the policy's steps on both sides took, over what steps with so many tokens
    took on the average of the hour. So what drifts cancels, and how deep the policy
    drafts makes no noise. Prompts are taken out of a block at what a token more takes,
    and those of the policy's steps added: the target's pass over them is made by every
    arm, the drafter's by those that draft.

    The variance is that of the linearised ratio, from sums over batches of blocks in
    the order of time: what blocks have in common with those next to them stays within a
    batch, and nothing need be known of it. Few batches cost some width, which Student's
    quantile tells (batch means: Schmeiser 1982). What n blocks of a load differ by from
    their own sums is too small by (n - 1) / n; a single one tells nothing of how wrong
    it may be, and its load counts as one without any.

    Args:
        loads: Sums by class of load.
        blocks: Of one arm, in the order of time.
        drafts: Whether the arm drafts. If not, a step in which the policy rests is a
            step of the arm as well; else such steps are left out.
        min_blocks: Fewer tell nothing; at least as many as batches.

    Returns:
        The gain; None where it cannot be told yet.
    """
    if len(blocks) < min_blocks:
        return None
    buckets = np.array([bucket_of(one.num_reqs) for one in blocks])
    everything = LoadSums()
    for sums in loads.values():
        everything.add(sums)
    usual_slope, _ = everything.slopes()
    influence = np.zeros(len(blocks))
    needed_ms = spent_ms = left_out_ms = 0.0
    for bucket, sums in loads.items():
        target_slope, first_slope = sums.slopes()
        prompt_slope = target_slope + (first_slope if drafts else 0.0)
        rest_ms = 0.0 if drafts else sums.rest_ms
        own = np.flatnonzero(buckets == bucket)
        if own.size > 1 and sums.num:
            # Where all passes are as wide, that of all loads.
            slopes = prompt_slope, target_slope or usual_slope
            columns = np.array([_columns(blocks[n], sums, *slopes) for n in own]).T
            ms, pace, num_steps, tokens = columns.sum(axis=1).tolist()
            shares = columns / columns.sum(axis=1, keepdims=True)
            arm_ms = sums.tokens * (ms / tokens) / (pace / num_steps)
            apart = shares[0] - shares[1] + shares[2] - shares[3]
            influence[own] = arm_ms * apart * math.sqrt(own.size / (own.size - 1))
        elif sums.num_rest and not drafts:
            # The policy rests, and tries drafting now and then.
            plain_ms = sums.rest_ms - target_slope * sums.num_rest_prompt
            arm_ms = sums.tokens * plain_ms / sums.num_rest
        else:
            left_out_ms += sums.ms
            continue
        needed_ms += arm_ms + prompt_slope * sums.num_prompt + rest_ms
        spent_ms += sums.ms + rest_ms
    if spent_ms < MIN_COVER * (spent_ms + left_out_ms) or spent_ms <= 0.0:
        return None
    ratio = needed_ms / spent_ms
    half = _half_width(influence) / spent_ms
    return Gain(ratio, ratio - half, ratio + half)


def report_gains(
    loads: Mapping[int, LoadSums], blocks: Iterable[BlockResult]
) -> dict[str, float]:
    """Return gauges: over each arm the gain and its interval, where it can be told."""
    found, blocks = dict[str, float](), list(blocks)
    for arm in get_args(Arm):
        own = [block for block in blocks if block.arm == arm]
        found[f"num_audited_{arm}"] = float(len(own))
        gain = estimate_gain(loads, own, drafts=arm != "none")
        if gain is not None:
            name = f"speculation_gain_{arm}"
            found[name] = gain.ratio
            found[f"{name}_lower"] = gain.lower
            found[f"{name}_upper"] = gain.upper
    return found


def _columns(
    block: BlockResult, sums: LoadSums, prompt_slope: float, slope: float
) -> tuple[float, float, float, float]:
    """Return a block's ms without prompts, its pace by steps, its steps and tokens."""
    expected_ms = sums.expect_target_ms(block.near_width, slope)
    pace = block.near_target_ms / expected_ms
    ms = block.ms - prompt_slope * block.num_prompt
    return ms, block.num_steps * pace, block.num_steps, block.tokens


def estimate_cost(loads: Mapping[int, LoadSums]) -> float:
    """Return the share of all time that the policy would have saved in audits."""
    lost_ms = total_ms = 0.0
    for sums in loads.values():
        total_ms += sums.ms + sums.rest_ms + sums.audited_ms
        if sums.tokens:
            own_ms = sums.audited_tokens * sums.ms / sums.tokens
            lost_ms += sums.audited_ms - own_ms
    return lost_ms / total_ms if total_ms else 0.0


def _half_width(influence: NDArray[np.float64]) -> float:
    """Return half a 95 % interval of a sum whose terms depend on their neighbours."""
    num_batches = min(max(MIN_BATCHES, round(math.sqrt(influence.size))), MAX_BATCHES)
    sums = np.array([part.sum() for part in np.array_split(influence, num_batches)])
    variance = float(sums @ sums) * num_batches / (num_batches - 1)
    return _student(num_batches - 1) * math.sqrt(variance)


def _student(freedom: int) -> float:
    """Return Student's quantile for 95 % (Cornish and Fisher's expansion)."""
    z = _NORMAL
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2
