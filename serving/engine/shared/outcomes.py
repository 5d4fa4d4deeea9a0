"""What the target made of a step's drafts, as vLLM's messages tell it."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from policies.types import VerificationOutcome

if TYPE_CHECKING:
    from collections.abc import Container

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


def keep_known(
    req_ids: list[str],
    num_verified: list[int],
    num_accepted: list[int],
    requests: Container[str],
) -> tuple[list[str], list[int], list[int]]:
    """Return outcomes, as `read_outcomes` does, of requests that have not ended."""
    is_known = [req_id in requests for req_id in req_ids]
    return (
        list(compress(req_ids, is_known)),
        list(compress(num_verified, is_known)),
        list(compress(num_accepted, is_known)),
    )


def read_emitted(
    scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
) -> list[tuple[str, int, int]]:
    """Return id, drafts accepted and tokens emitted of all that emitted something."""
    sampled = model_runner_output.sampled_token_ids
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return [
        (
            req_id,
            max(0, len(sampled[row]) - 1) if drafts.get(req_id) else 0,
            len(sampled[row]),
        )
        for req_id, row in model_runner_output.req_id_to_index.items()
        if row < len(sampled) and sampled[row]
    ]


def keep_rows(outcome: VerificationOutcome, is_kept: list[bool]) -> VerificationOutcome:
    """Return an outcome of some of its requests.

    Args:
        outcome: Of named requests.
        is_kept: `[num_reqs]`.
    """
    confidence, num_accepted = outcome.confidence, outcome.num_accepted[is_kept]
    return VerificationOutcome(
        num_verified=outcome.num_verified[is_kept],
        num_accepted=num_accepted,
        req_ids=tuple(compress(outcome.req_ids, is_kept)),
        confidence=None if confidence is None else confidence[is_kept],
        num_unlearnt=int(outcome.num_accepted.sum() - num_accepted.sum()),
    )
