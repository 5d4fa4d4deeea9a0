"""Keeps faults of policies and drafters away from the engine between them."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import gt, index
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from policies.decisions.select import blank_past

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from numpy.typing import NDArray

    from policies.planner import Planner
    from policies.types import DraftBatch, DraftSelection

logger = init_logger(__name__)


class FaultGuard:
    """Asks a policy, and counts and logs faults instead of passing them on.

    Our own code runs inside vLLM's step, where an exception ends the engine and every
    request in it. A part that fails is left out of the step, which then goes on as
    vLLM's own would. Every reason is logged once, with its first traceback, and counted
    always:

        `policy_error`        the policy failed, or answered what cannot be done
        `confidence_missing`  the drafter said nothing of its drafts
        `confidence_invalid`  it said what is no probability
        `plain_...`           a GPU engine leaves no drafts out (`plain_verification`)

    and, in our own parts, `drafts_error` (looking through new drafts),
    `selection_error` (describing and trimming them), `order_error` (the same towards
    the device), `limits_error` (running requests and prompts), `ageing_error`,
    `kv_error`, `depth_error`, `skip_error`, `timing_error`, `outcome_error` (what there
    is to learn), `count_error`, `board_error`, `audit_error` (saying what is gained),
    `forget_error` (requests that ended); in
    the worker `report_error` (what it tells the scheduler), `stop_error` (ending a
    draft early), `drafter_error` (leaving the drafter out and catching up).
    """

    def __init__(self, num_fallbacks: Counter[str], place: str) -> None:
        """Count into these, and log that it happened in this place."""
        self._num_fallbacks = num_fallbacks
        self._place = place
        self._logged: set[str] = set()

    def hand_over(self) -> dict[str, int]:
        """Return what was counted since the last time, for another to count."""
        counted: dict[str, int] = {}
        # One by one: on a GPU another thread may be counting.
        while self._num_fallbacks:
            reason, count = self._num_fallbacks.popitem()
            counted[reason] = count
        return counted

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Return the policy's answer, None if it fails."""
        return self.attempt("policy_error", question, *args)

    def attempt(self, reason: str, action: Callable[..., Any], *args: Any) -> Any:
        """Return what a part of our own returns, None if it fails."""
        try:
            return action(*args)
        except Exception:
            self.note(reason, exc_info=True)
            return None

    def note(self, reason: str, *, exc_info: bool = False) -> None:
        """Count one fault."""
        self._num_fallbacks[reason] += 1
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "Speculation (%s): %s; the step goes on without, as vLLM's own would. "
                "Logged once, counted in tetris_fallbacks_total.",
                self._place,
                reason,
                exc_info=exc_info,
            )


def select_checked(planner: Planner, batch: DraftBatch) -> DraftSelection:
    """Return a planner's selection of a batch if it can be applied, or refuse it.

    Raises:
        TypeError: If one of its figures is no number.
        ValueError: If it does not admit a whole number of drafts per request, between
            none and those offered, or another figure makes no sense.
    """
    selection = planner.select(batch)
    offered = batch.num_draft_tokens
    admitted = np.asarray(selection.num_admitted)
    if (
        admitted.dtype.kind not in "iu"
        or admitted.shape != offered.shape
        or min(admitted.tolist(), default=0) < 0
        or any(map(gt, admitted.tolist(), offered.tolist()))
    ):
        raise ValueError(f"policy admitted {admitted} of {offered} drafts")
    expected = selection.expected_accepted
    if (
        index(selection.draft_budget) < 0
        or index(selection.num_cut_by_latency) < 0
        or not (math.isnan(expected) or 0.0 <= expected < math.inf)
    ):
        raise ValueError(f"policy made an impossible selection: {selection}")
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
