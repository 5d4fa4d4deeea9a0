"""How likely drafts are to be accepted, however their drafter reports on itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from policies.estimators.acceptance import PositionAcceptance
from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.feedback import DraftFeedback
from policies.estimators.priors import prior_of
from policies.estimators.state import read_part

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from policies.types import DraftBatch, VerificationOutcome

FLUSH_EVERY = range(2, 9)
"""Steps whose outcomes are learnt together, much cheaper than one by one: the fewest,
for a request or two, whose last tokens say most about its next, to the most."""


@dataclass(slots=True)
class DraftAcceptance:
    """Predicts acceptance, from confidence where there is any, and learns it.

    Attributes:
        calibration: From confidence; what a drafter with logits is predicted by.
        positions: By position alone, for drafters that report none.
        feedback: Pairs drafts with what became of them.
    """

    calibration: ConfidenceCalibration
    positions: PositionAcceptance
    feedback: DraftFeedback
    _uses_positions: bool = field(init=False, default=False)
    _steps_unlearnt: int = field(init=False, default=0)
    _forgotten: list[Hashable] = field(init=False, default_factory=list)

    @classmethod
    def from_prior(cls, max_depth: int, method: str) -> Self:
        """Start from what is believed of a drafting method, by vLLM's name."""
        prior = prior_of(method)
        return cls(
            ConfidenceCalibration(max_depth, prior.intercept, prior.slope),
            PositionAcceptance(max_depth, prior.acceptance),
            DraftFeedback(max_depth),
        )

    def predict(self, batch: DraftBatch) -> NDArray[np.float64]:
        """Return acceptance given that everything before was accepted.

        Returns:
            `[num_reqs, depth]`, 0-1, C-contiguous, depth at least that of the longest
            draft.

        Raises:
            ValueError: If the batch's confidences do not fit its drafts.
        """
        if batch.confidence is None:
            self._uses_positions = True
            per_position = self.positions.estimate()[: batch.max_depth]
            acceptance = np.tile(per_position, (batch.num_reqs, 1))
        else:
            req_ids = batch.req_ids or tuple(range(batch.num_reqs))
            acceptance = self.calibration.predict(batch.confidence, req_ids)
        if acceptance.shape[0] != batch.num_reqs or acceptance.shape[1] < (
            batch.max_depth
        ):
            raise ValueError(
                f"drafts of {batch.max_depth} tokens, acceptance of shape "
                f"{acceptance.shape}"
            )
        return acceptance

    def typical(self) -> NDArray[np.float64]:
        """Return what stands for drafts while there are hardly any, `[max_depth]`."""
        if self._uses_positions:
            return self.positions.estimate()
        return self.calibration.mean_acceptance(self.calibration.max_depth)

    def observe(self, outcome: VerificationOutcome) -> None:
        """Take in a step's outcome; those of a few steps are learnt together."""
        if self._uses_positions:
            self.positions.observe(outcome)
        self.feedback.observe(outcome)
        self._steps_unlearnt += 1
        flush_after = max(FLUSH_EVERY[0], outcome.num_verified.size // 2)
        if self._steps_unlearnt >= min(flush_after, FLUSH_EVERY[-1]):
            self._steps_unlearnt = 0
            # Requests whose last outcomes are learnt after they have ended.
            forgotten, self._forgotten = self._forgotten, []
            try:
                self.feedback.flush(self.calibration)
            finally:
                for req_id in forgotten:
                    self.calibration.forget(req_id)

    def forget(self, req_id: Hashable) -> None:
        """Drop what is known about a finished request."""
        self.calibration.forget(req_id)
        self._forgotten.append(req_id)

    def export_state(self) -> dict[str, Any]:
        """Return what was learnt about the model pair, as plain values."""
        return {
            "calibration": self.calibration.export_state(),
            "positions": self.positions.export_state(),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another engine's `export_state`.

        Raises:
            ValueError: If it was learnt at another depth, or cannot be true; one half
                may have changed then.
        """
        self.calibration.import_state(read_part(state, "calibration"))
        self.positions.import_state(read_part(state, "positions"))
