"""What the target made of a step's drafts, as vLLM's messages tell it."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from policies.types import VerificationOutcome

if TYPE_CHECKING:
    from serving.engine.compat import ModelRunnerOutput, SchedulerOutput

NOTHING_VERIFIED = VerificationOutcome(
    num_verified=np.empty(0, dtype=np.int64), num_accepted=np.empty(0, dtype=np.int64)
)


def read_outcomes(
    scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
) -> tuple[list[str], list[int], list[int]]:
    """Return requests, drafts scheduled and drafts accepted, where there were any.

    Lists, because a step's few numbers are counted faster than NumPy is woken up.

    Returns:
        Request ids, and twice `[num_reqs]`; requests without drafts and those that
        sampled nothing are left out.
    """
    sampled = model_runner_output.sampled_token_ids
    row_of = model_runner_output.req_id_to_index
    req_ids, num_drafts, num_accepted = [], [], []
    for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        row = row_of.get(req_id)
        if row is None or not drafts:
            continue
        num_sampled = len(sampled[row])
        if num_sampled:
            req_ids.append(req_id)
            num_drafts.append(len(drafts))
            num_accepted.append(num_sampled - 1)
    return req_ids, num_drafts, num_accepted


def keep_rows(outcome: VerificationOutcome, is_kept: list[bool]) -> VerificationOutcome:
    """Return an outcome of some of its requests.

    Args:
        outcome: Of named requests.
        is_kept: `[num_reqs]`.
    """
    confidence = outcome.confidence
    return VerificationOutcome(
        num_verified=outcome.num_verified[is_kept],
        num_accepted=outcome.num_accepted[is_kept],
        req_ids=tuple(compress(outcome.req_ids, is_kept)),
        confidence=None if confidence is None else confidence[is_kept],
    )
