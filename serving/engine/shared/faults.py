"""Keeps faults of policies and drafters away from the engine between them."""

from __future__ import annotations

from dataclasses import replace
from operator import gt
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from policies.decisions.select import blank_past

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from policies.types import DraftBatch, DraftSelection
    from serving.engine.shared.counters import SpeculationCounters

logger = init_logger(__name__)


class FaultGuard:
    """Asks a policy, and counts and logs its faults instead of passing them on.

    Every reason is logged once, with its first traceback, and counted always.
    """

    def __init__(self, counters: SpeculationCounters) -> None:
        """Count into an engine's counters."""
        self._counters = counters
        self._logged: set[str] = set()

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Return the policy's answer, None if it fails."""
        try:
            return question(*args)
        except Exception:
            self.note("policy_error", exc_info=True)
            return None

    def note(self, reason: str, *, exc_info: bool = False) -> None:
        """Count one fault."""
        self._counters.num_fallbacks[reason] += 1
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "Speculation policy %s: %s; verifying what was drafted. Logged once, "
                "counted in tetris_fallbacks_total.",
                self._counters.policy,
                reason,
                exc_info=exc_info,
            )


def check_selection(selection: DraftSelection, batch: DraftBatch) -> DraftSelection:
    """Return a selection that can be applied to its batch, or refuse it.

    Raises:
        ValueError: If it does not admit a whole number of drafts per request, between
            none and those offered.
    """
    offered = batch.num_draft_tokens
    admitted = np.asarray(selection.num_admitted)
    if (
        admitted.dtype.kind not in "iu"
        or admitted.shape != offered.shape
        or min(admitted.tolist(), default=0) < 0
        or any(map(gt, admitted.tolist(), offered.tolist()))
    ):
        raise ValueError(f"policy admitted {admitted} of {offered} drafts")
    if admitted is selection.num_admitted:
        return selection
    return replace(selection, num_admitted=admitted)


def screen_confidence(
    confidence: NDArray[np.float64],
    num_draft_tokens: NDArray[np.int64],
    guard: FaultGuard,
) -> tuple[NDArray[np.float64], list[bool]]:
    """Let through what a drafter may say of its drafts; every adapter asks here.

    One number that is no probability would stay in all that is learnt.

    Args:
        confidence: `[num_reqs, depth]`, C-contiguous.
        num_draft_tokens: `[num_reqs]`, how many of them count.
        guard: Counts a step with anything else.

    Returns:
        The confidences, 0 past what counts, and `[num_reqs]`, whose may be used.
    """
    blanked, is_usable = blank_past(confidence, num_draft_tokens)
    usable: list[bool] = is_usable.tolist()
    if not all(usable):
        guard.note("confidence_invalid")
    return blanked, usable
