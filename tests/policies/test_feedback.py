"""Which drafts an outcome is about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.feedback import DraftFeedback
from policies.types import DraftBatch, VerificationOutcome

IDS = ("a", "b", "c")
CONFIDENCE = np.array([[0.9, 0.8], [0.6, 0.5], [0.7, 0.2]])


def teach(num_verified: list[int], num_accepted: list[int], req_ids: tuple[str, ...]):
    """Return what a calibration learnt from one step of three requests."""
    feedback, calibration = DraftFeedback(2), ConfidenceCalibration(2)
    lengths = np.full(3, 2, dtype=np.int64)
    feedback.note(DraftBatch(lengths, CONFIDENCE, IDS, num_decodes=3))
    outcome = VerificationOutcome(
        np.array(num_verified, dtype=np.int64),
        np.array(num_accepted, dtype=np.int64),
        req_ids,
    )
    feedback.observe(outcome)
    feedback.flush(calibration)
    return calibration.predict(CONFIDENCE, IDS)


def test_outcomes_find_their_drafts_in_any_order_and_number():
    whole = teach([2, 0, 1], [1, 0, 1], IDS)

    assert teach([1, 2], [1, 1], ("c", "a")) == pytest.approx(whole)
    # Requests that nothing is known about teach nothing.
    assert teach([1, 2, 2], [1, 1, 2], ("c", "a", "new")) == pytest.approx(whole)
    assert teach([2, 1], [1, 1], ("c", "a")) != pytest.approx(whole)


def test_outcomes_without_a_batch_teach_nothing():
    untaught = ConfidenceCalibration(2).predict(CONFIDENCE, IDS)

    assert teach([2], [2], ("new",)) == pytest.approx(untaught)
    assert teach([], [], ()) == pytest.approx(untaught)


@pytest.mark.parametrize(
    "malformed",
    [
        {"num_accepted": np.array([1])},
        {"num_verified": np.array([1])},
        {"req_ids": ("a",)},
        {"confidence": np.array([[0.9, 0.8]])},
        {"confidence": np.array([0.9, 0.8])},
    ],
)
def test_an_outcome_of_another_shape_is_refused_and_spoils_no_other(malformed):
    feedback, calibration = DraftFeedback(2), ConfidenceCalibration(2)
    outcome = VerificationOutcome(
        np.array([2, 2]), np.array([1, 2]), ("a", "b"), confidence=CONFIDENCE[:2]
    )
    feedback.observe(outcome)

    with pytest.raises(ValueError, match="outcomes"):
        feedback.observe(replace(outcome, **malformed))

    feedback.flush(calibration)
    assert calibration.export_state() != ConfidenceCalibration(2).export_state()


class FailsOnce(ConfidenceCalibration):
    """Cannot learn from the first outcomes it is given."""

    has_failed = False

    def observe(self, *args: object) -> None:
        if not self.has_failed:
            type(self).has_failed = True
            raise ValueError("of no use")
        super().observe(*args)


def test_outcomes_that_cannot_be_learnt_are_lost_and_the_next_ones_teach():
    feedback, calibration = DraftFeedback(2), FailsOnce(2)
    good = VerificationOutcome(np.array([2]), np.array([2]), ("a",), CONFIDENCE[:1])
    untaught = calibration.predict(CONFIDENCE, IDS)
    feedback.observe(good)
    with pytest.raises(ValueError, match="of no use"):
        feedback.flush(calibration)
    assert calibration.predict(CONFIDENCE, IDS) == pytest.approx(untaught)

    feedback.observe(good)
    feedback.flush(calibration)

    assert (calibration.predict(CONFIDENCE, IDS)[0] > untaught[0]).all()
