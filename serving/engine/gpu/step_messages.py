"""What scheduler and worker tell each other about a step beside vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from policies.types import AcceptanceScale, CostProfile

ORDER_ATTRIBUTE = "tetris_order"
"""Where a `SchedulerOutput` carries its order: an attribute of its own, which pickling
between processes keeps and vLLM does not look at."""

REPORT_ATTRIBUTE = "tetris_report"
"""Where a `ModelRunnerOutput` carries its report, likewise."""


@dataclass(frozen=True, slots=True)
class VerificationOrder:
    """What the scheduler decided about one step; every rank receives the same.

    Attributes:
        step_id: Counts up from 1, to match reports with steps.
        draft_budget: Draft tokens to verify; never more than were scheduled.
        req_ids: `[num_reqs]`, requests that `scale.effect` and `weights` are about.
        scale: How to rank; None ranks by confidence itself.
        weights: `[num_reqs]`, > 0, what a token of each request is worth; None where
            all are alike.
    """

    step_id: int
    draft_budget: int
    req_ids: tuple[str, ...] = ()
    scale: AcceptanceScale | None = None
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Where one step's time went on the device, in milliseconds.

    Attributes:
        step_id: Of the order the step was run under.
        target_ms: Forward pass, sampling, rejection.
        draft_first_ms: The drafter's first pass.
        draft_next_ms: All further passes.
        gap_ms: From the end of the step before to the start of this one's forward
            pass: input preparation, and waiting for the host or for requests.
    """

    step_id: int
    target_ms: float
    draft_first_ms: float
    draft_next_ms: float
    gap_ms: float


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What became of the drafts of one step, as far as the device decided it.

    Attributes:
        req_ids: `[num_reqs]`, the batch in the order of the rows below.
        confidence: `[num_reqs, num_speculative_tokens]`, float32, of the drafts that
            this step verified: made one step earlier, copied while this one ran.
            Columns past what a request had scheduled mean nothing.
        num_admitted: `[num_reqs]`, int32, drafts verified.
    """

    req_ids: tuple[str, ...]
    confidence: NDArray[np.float32]
    num_admitted: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a worker tells the scheduler with a step's sampled tokens.

    Attributes:
        step_id: Of the order the step was run under.
        verification: None if the step had no drafts, or verified them all for want of
            anything else.
        times: Of earlier steps, those the device has finished.
        profile: Forward passes timed at start-up; with the first report only.
        plain_reason: Why this worker verifies everything, if it found out itself.
        faults: What failed in the worker since the last time, by reason.
    """

    step_id: int
    verification: VerificationReport | None = None
    times: tuple[DeviceTimes, ...] = ()
    profile: CostProfile | None = None
    plain_reason: str | None = None
    faults: dict[str, int] = field(default_factory=dict)
