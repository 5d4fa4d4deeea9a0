"""What became of a step's drafts: vLLM's outputs joined with the worker's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.types import VerificationOutcome
from serving.engine.gpu.stale_confidence import StaleConfidence
from serving.engine.shared.faults import screen_confidence
from serving.engine.shared.outcomes import NOTHING_VERIFIED, read_outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from policies.types import DraftSelection
    from serving.engine.compat import ModelRunnerOutput, Request, SchedulerOutput
    from serving.engine.gpu.step_messages import StepReport, VerificationReport
    from serving.engine.shared.board import BoardRecorder
    from serving.engine.shared.counters import SpeculationCounters
    from serving.engine.shared.faults import FaultGuard


class OutcomeReader:
    """Counts outcomes, keeps the confidences reported, and tells what can be learnt.

    Attributes:
        confidence: The latest of every request.
    """

    def __init__(
        self,
        max_depth: int,
        num_slots: int,
        counters: SpeculationCounters,
        guard: FaultGuard,
    ) -> None:
        """Start without any request.

        Args:
            max_depth: Deepest draft.
            num_slots: Requests to have room for at first, >= 1.
            counters: Count what was verified, and what left out.
            guard: Counts confidences that are none.
        """
        self.confidence = StaleConfidence(max_depth, num_slots)
        self._counters = counters
        self._guard = guard

    def read(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        report: VerificationReport | None,
        selection: DraftSelection | None,
        requests: Mapping[str, Request],
    ) -> VerificationOutcome:
        """Take in a step.

        Args:
            scheduler_output: The step.
            model_runner_output: Its tokens.
            report: What the device verified; None if it said nothing.
            selection: The planner's; None if it had made none.
            requests: By id; vLLM keeps some after their end.

        Returns:
            What can be learnt of those still known.
        """
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        req_ids, num_drafts, num_accepted = read_outcomes(
            scheduler_output, model_runner_output
        )
        num_verified = num_drafts
        outcome = NOTHING_VERIFIED
        if report is not None and req_ids:
            drafts = np.array(num_drafts, dtype=np.int64)
            row_of = {req_id: row for row, req_id in enumerate(report.req_ids)}
            rows = np.array([row_of.get(r, -1) for r in req_ids], dtype=np.int64)
            is_reported = rows >= 0
            verified = np.where(is_reported, report.num_admitted[rows], drafts)
            num_verified = verified.tolist()
            # What has ended was forgotten, though a step was in flight; a KV connector
            # that has not sent all of a request's blocks keeps it with them.
            is_known = [
                (request := requests.get(req_id)) is not None
                and not request.is_finished()
                for req_id in req_ids
            ]
            known = np.flatnonzero(is_reported & is_known)
            confidence, is_usable = screen_confidence(
                report.confidence[rows[known]].astype(np.float64),
                drafts[known],
                self._guard,
            )
            if not all(is_usable):
                known, confidence = known[is_usable], confidence[is_usable]
            self.confidence.note(
                [req_ids[index] for index in known], confidence, drafts[known]
            )
            if invalid:
                # A draft that a grammar forbade says nothing about the drafter.
                is_valid = [req_ids[index] not in invalid for index in known]
                known, confidence = known[is_valid], confidence[is_valid]
            outcome = VerificationOutcome(
                num_verified=verified[known],
                num_accepted=np.array(num_accepted, dtype=np.int64)[known],
                req_ids=tuple(req_ids[index] for index in known),
                confidence=confidence,
            )
        counters = self._counters
        num_left_out = sum(num_drafts) - sum(num_verified)
        if selection is None:
            counters.count_cut("budget", num_left_out)
        else:
            counters.count_left_out(selection, num_left_out)
        if invalid:
            # What a grammar forbids is the end of a draft, as is what was left out.
            num_valid = [
                min(verified, drafts - invalid.get(req_id, 0))
                for req_id, drafts, verified in zip(
                    req_ids, num_drafts, num_verified, strict=True
                )
            ]
            counters.count_cut("grammar", sum(num_verified) - sum(num_valid))
            num_verified = num_valid
        counters.count_verification(num_verified, num_accepted)
        return outcome


def show_drafts(
    board: BoardRecorder, scheduler_output: SchedulerOutput, report: StepReport | None
) -> None:
    """Put on the board what the device admitted of a step's drafts, if it said so."""
    verification = None if report is None else report.verification
    if verification is None:
        return
    drafts = scheduler_output.scheduled_spec_decode_tokens
    rows = [row for row, r in enumerate(verification.req_ids) if drafts.get(r)]
    board.note_drafts(
        {verification.req_ids[row]: drafts[verification.req_ids[row]] for row in rows},
        verification.confidence[rows].astype(np.float64),
        verification.num_admitted[rows].tolist(),
    )
