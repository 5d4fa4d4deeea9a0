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
    feedback.note(DraftBatch(np.full(3, 2), CONFIDENCE, IDS, num_decodes=3))
    verified, accepted = np.array([num_verified, num_accepted], dtype=np.int64)
    feedback.observe(VerificationOutcome(verified, accepted, req_ids))
    feedback.flush(calibration)
    return calibration.predict(CONFIDENCE, IDS)


def test_outcomes_find_their_drafts_in_any_order_and_number():
    whole = teach([2, 0, 1], [1, 0, 1], IDS)
    assert teach([1, 2], [1, 1], ("c", "a")) == pytest.approx(whole)
    # Requests that nothing is known about teach nothing.
    assert teach([1, 2, 2], [1, 1, 2], ("c", "a", "new")) == pytest.approx(whole)
    assert teach([2, 1], [1, 1], ("c", "a")) != pytest.approx(whole)

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
def test_an_outcome_of_another_shape_is_refused_and_spoils_no_other(
    malformed: dict[str, object],
):
    feedback, calibration = DraftFeedback(2), ConfidenceCalibration(2)
    outcome = VerificationOutcome(
        np.array([2, 2]), np.array([1, 2]), ("a", "b"), confidence=CONFIDENCE[:2]
    )
    feedback.observe(outcome)

    with pytest.raises(ValueError, match="outcomes"):
        feedback.observe(replace(outcome, **malformed))

    feedback.flush(calibration)
    assert calibration.export_state() != ConfidenceCalibration(2).export_state()


def test_outcomes_that_cannot_be_learnt_are_lost_and_the_next_ones_teach():
    feedback, calibration = DraftFeedback(2), ConfidenceCalibration(2)
    untaught = calibration.predict(CONFIDENCE, IDS)
    good = VerificationOutcome(np.array([2]), np.array([2]), ("a",), CONFIDENCE[:1])
    feedback.observe(good)
    feedback.observe(replace(good, confidence=np.full((1, 2), np.nan)))
    with pytest.raises(ValueError, match="row 1"):
        feedback.flush(calibration)
    assert calibration.predict(CONFIDENCE, IDS) == pytest.approx(untaught)

    feedback.observe(good)
    feedback.flush(calibration)

    assert (calibration.predict(CONFIDENCE, IDS)[0] > untaught[0]).all()
