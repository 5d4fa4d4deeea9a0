"""What the worker hands the scheduler: draft tokens with their confidences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.engine.compat import DraftTokenIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from policies.types import CostProfile


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Where one step's time went in the worker, in milliseconds.

    Attributes:
        target_ms: The target's forward pass, logits included.
        sample_ms: From the sampler's start to the drafter's: sampling, rejection.
        draft_first_ms: The drafter's first pass, over every token of the step, or all
            of its work if it makes no passes.
        draft_next_ms: All further draft passes together.
        depth: Draft tokens made per request, 0 if none.
        backlog_ms: Filling the drafter's cache after it had been skipped.
        num_backlog: Positions filled then.
    """

    target_ms: float
    sample_ms: float
    draft_first_ms: float
    draft_next_ms: float
    depth: int
    backlog_ms: float = 0.0
    num_backlog: int = 0


@dataclass
class ScoredDraftTokenIds(DraftTokenIds):
    """Draft token ids of one step and how sure the drafter was of each position.

    Attributes:
        confidence: `[num_reqs, depth]`, float64, rows in the order of `req_ids`; None
            when this step's drafter reported none.
        drafter_skipped: The runner skipped the drafter in this step and filled in
            placeholder tokens, which nobody should verify.
        times: What the step cost in the worker; None if it was not measured.
        profile: Forward passes timed at start-up; travels with the first drafts only.
        faults: What failed in the worker since the last time, by reason.
    """

    confidence: NDArray[np.float64] | None = None
    drafter_skipped: bool = False
    times: WorkerTimes | None = None
    profile: CostProfile | None = None
    faults: dict[str, int] = field(default_factory=dict)
