"""Pairs what drafts looked like with what became of them, for calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from policies.estimators.calibration import ConfidenceCalibration
    from policies.types import DraftBatch, VerificationOutcome


class _StepOutcome(NamedTuple):
    req_ids: tuple[Hashable, ...]
    confidence: NDArray[np.float64]
    num_verified: NDArray[np.int64]
    num_accepted: NDArray[np.int64]


@dataclass(slots=True)
class DraftFeedback:
    """The batch under verification, and outcomes not learnt from yet."""

    max_depth: int
    _batch: DraftBatch | None = field(init=False, default=None)
    _outcomes: list[_StepOutcome] = field(init=False, default_factory=list)

    def note(self, batch: DraftBatch) -> None:
        """Keep the confidences of drafts that are about to be verified."""
        self._batch = batch

    def observe(self, outcome: VerificationOutcome) -> None:
        """Take in a step's outcome.

        Raises:
            ValueError: If its parts are not about the same requests. It is left out
                then, and spoils no other.
        """
        batch, self._batch = self._batch, None
        _check_shapes(outcome)
        if outcome.confidence is not None:
            # The engine knows better than `note` what it verified.
            self._outcomes.append(
                _StepOutcome(
                    outcome.req_ids,
                    outcome.confidence[:, : self.max_depth],
                    outcome.num_verified,
                    outcome.num_accepted,
                )
            )
            return
        if batch is None or batch.confidence is None:
            return
        if not (batch.req_ids and outcome.req_ids):
            return
        req_ids, confidence = outcome.req_ids, batch.confidence
        num_verified, num_accepted = outcome.num_verified, outcome.num_accepted
        if req_ids != batch.req_ids:
            # In the order of the batch; of what was not verified nothing is learnt.
            row_of = {req_id: row for row, req_id in enumerate(batch.req_ids)}
            verified, accepted = [0] * len(row_of), [0] * len(row_of)
            outcomes = zip(
                req_ids, num_verified.tolist(), num_accepted.tolist(), strict=True
            )
            for req_id, own_verified, own_accepted in outcomes:
                row = row_of.get(req_id)
                if row is not None:
                    verified[row], accepted[row] = own_verified, own_accepted
            req_ids = batch.req_ids
            num_verified = np.array(verified, dtype=np.int64)
            num_accepted = np.array(accepted, dtype=np.int64)
        self._outcomes.append(
            _StepOutcome(req_ids, confidence, num_verified, num_accepted)
        )

    def flush(self, calibration: ConfidenceCalibration) -> None:
        """Let the calibration learn from all outcomes since the last time."""
        if not self._outcomes:
            return
        # Before anything can fail, or one malformed outcome would stop all learning.
        outcomes, self._outcomes = self._outcomes, []
        req_ids = [req_id for outcome in outcomes for req_id in outcome.req_ids]
        confidence = np.zeros((len(req_ids), self.max_depth))
        start = 0
        for outcome in outcomes:
            num_reqs, depth = outcome.confidence.shape
            confidence[start : start + num_reqs, :depth] = outcome.confidence
            start += num_reqs
        calibration.observe(
            confidence,
            req_ids,
            np.concatenate([outcome.num_verified for outcome in outcomes]),
            np.concatenate([outcome.num_accepted for outcome in outcomes]),
        )


def _check_shapes(outcome: VerificationOutcome) -> None:
    """Refuse what could not be put beside other outcomes later."""
    num_reqs = outcome.num_verified.size
    confidence = outcome.confidence
    fits = outcome.num_accepted.size == num_reqs
    if confidence is not None:
        fits = fits and len(outcome.req_ids) == num_reqs
        fits = fits and confidence.ndim == 2 and confidence.shape[0] == num_reqs
    elif outcome.req_ids:
        fits = fits and len(outcome.req_ids) == num_reqs
    if not fits:
        raise ValueError(
            f"outcomes of {len(outcome.req_ids)} requests hold {num_reqs} verified, "
            f"{outcome.num_accepted.size} accepted and confidences of shape "
            f"{None if confidence is None else confidence.shape}"
        )
