"""What the target made of a step's drafts, as vLLM's messages tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.batch import VerificationOutcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.engine.compat import ModelRunnerOutput, SchedulerOutput

NOTHING_VERIFIED = VerificationOutcome(
    num_verified=np.empty(0, dtype=np.int64), num_accepted=np.empty(0, dtype=np.int64)
)


def read_outcomes(
    scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Return requests, drafts scheduled and drafts accepted, where there were any.

    Returns:
        Request ids, and twice `[num_reqs]`; requests without drafts and those that
        sampled nothing are left out.
    """
    sampled = model_runner_output.sampled_token_ids
    row_of = model_runner_output.req_id_to_index
    found = [
        (req_id, len(drafts), len(sampled[row_of[req_id]]) - 1)
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
        if drafts and req_id in row_of and sampled[row_of[req_id]]
    ]
    counts = np.array([one[1:] for one in found], dtype=np.int64).reshape(-1, 2)
    return [one[0] for one in found], counts[:, 0], counts[:, 1]
