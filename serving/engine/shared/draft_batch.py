"""Describes the drafts of a batch, and what runs beside them, to a planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.types import DraftBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from serving.engine.compat import Request, Scheduler
    from serving.engine.shared.request_classes import RequestClasses


def describe_drafts(
    scheduler: Scheduler,
    classes: RequestClasses,
    requests: list[Request],
    num_draft_tokens: NDArray[np.int64],
    confidence: NDArray[np.float64] | None,
    *,
    drafts_are_sampled: bool,
    num_coming_tokens: int = 0,
) -> DraftBatch:
    """Return the drafts of some running requests.

    Args:
        scheduler: Whose requests they are.
        classes: Tell what they are worth.
        requests: `[num_reqs]`, those with drafts.
        num_draft_tokens: `[num_reqs]`, how many.
        confidence: `[num_reqs, depth]`; None if the drafter has none.
        drafts_are_sampled: As `DraftBatch.drafts_are_sampled`.
        num_coming_tokens: Of waiting prompts that will join the step.
    """
    num_decodes = num_context_tokens = 0
    num_prefill_tokens = num_coming_tokens
    for request in scheduler.running:
        num_computed = request.num_computed_tokens
        # Under asynchronous scheduling, tokens in flight count as computed.
        num_tokens = request.num_tokens + request.num_output_placeholders
        num_uncomputed = num_tokens - num_computed
        num_context_tokens += num_computed
        if num_uncomputed == 1:
            num_decodes += 1
        elif num_uncomputed > 1:
            num_prefill_tokens += num_uncomputed
    return DraftBatch(
        num_draft_tokens=num_draft_tokens,
        confidence=confidence,
        req_ids=tuple([request.request_id for request in requests]),
        num_decodes=num_decodes,
        num_prefill_tokens=num_prefill_tokens,
        num_context_tokens=num_context_tokens,
        drafts_are_sampled=drafts_are_sampled,
        weights=classes.weigh(requests),
        latency_targets_ms=classes.targets_ms(requests),
    )
