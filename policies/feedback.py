"""Pairs what drafts looked like with what became of them, for calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from policies.batch import DraftBatch, VerificationOutcome
    from policies.calibration import ConfidenceCalibration

LEARN_EVERY = 4
"""Steps whose outcomes are learnt from together."""


class _Outcome(NamedTuple):
    req_id: Hashable
    confidence: NDArray[np.float64]
    num_verified: int
    num_accepted: int


@dataclass(slots=True)
class DraftFeedback:
    """Confidences of drafts under verification, and outcomes not learnt from yet."""

    max_depth: int
    _confidence: dict[Hashable, NDArray[np.float64]] = field(
        init=False, default_factory=dict
    )
    _outcomes: list[_Outcome] = field(init=False, default_factory=list)
    _num_steps: int = field(init=False, default=0)

    def note(self, batch: DraftBatch) -> None:
        """Keep the confidences of drafts that are about to be verified."""
        if batch.confidence is not None:
            self._confidence.update(zip(batch.req_ids, batch.confidence, strict=False))

    def observe(
        self, outcome: VerificationOutcome, calibration: ConfidenceCalibration
    ) -> None:
        """Take in a step's outcome; every few steps, let the calibration learn."""
        for req_id, num_verified, num_accepted in zip(
            outcome.req_ids,
            outcome.num_verified.tolist(),
            outcome.num_accepted.tolist(),
            strict=False,
        ):
            confidence = self._confidence.get(req_id)
            if confidence is not None:
                self._outcomes.append(
                    _Outcome(req_id, confidence, num_verified, num_accepted)
                )
        self._num_steps += 1
        if self._num_steps % LEARN_EVERY == 0 and self._outcomes:
            self._learn(calibration)

    def forget(self, req_id: Hashable) -> None:
        """Drop a finished request."""
        self._confidence.pop(req_id, None)

    def _learn(self, calibration: ConfidenceCalibration) -> None:
        outcomes = self._outcomes
        confidence = np.zeros((len(outcomes), self.max_depth))
        for index, outcome in enumerate(outcomes):
            confidence[index, : outcome.confidence.size] = outcome.confidence
        calibration.observe(
            confidence,
            [outcome.req_id for outcome in outcomes],
            np.array([outcome.num_verified for outcome in outcomes]),
            np.array([outcome.num_accepted for outcome in outcomes]),
        )
        outcomes.clear()
