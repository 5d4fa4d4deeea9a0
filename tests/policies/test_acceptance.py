"""What is learnt of acceptance: by position, from confidence, and of whose drafts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.estimators.acceptance import (
    FORGETTING,
    PRIOR_ACCEPTANCE,
    PRIOR_WEIGHT,
    PositionAcceptance,
)
from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.feedback import DraftFeedback
from policies.estimators.logit import to_log_odds, to_probability
from policies.goodput import GoodputPlanner
from policies.types import DraftBatch, VerificationOutcome
from tests.policies.made_up import LIMITS

MAX_DEPTH = 4

# (verified, accepted) of each request in each step; some deeper than is learnt.
OUTCOMES = st.integers(0, MAX_DEPTH + 2).flatmap(
    lambda verified: st.tuples(st.just(verified), st.integers(0, verified))
)
STEPS = st.lists(st.lists(OUTCOMES, max_size=4), max_size=8)


def observe(learner, step):
    verified, accepted = np.array(step, dtype=np.int64).reshape(-1, 2).T
    learner.observe(VerificationOutcome(verified, accepted))


@given(STEPS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_position_is_judged_by_the_outcomes_that_reached_it(steps):
    """Verified, and all before it accepted; a step that verifies nothing is none."""
    learner = PositionAcceptance(MAX_DEPTH)
    expected = np.full(MAX_DEPTH, PRIOR_ACCEPTANCE)
    accepted, observed = np.zeros(MAX_DEPTH), np.zeros(MAX_DEPTH)
    for step in steps:
        np.testing.assert_allclose(learner.estimate(), expected)
        before = learner.estimate()
        observe(learner, step)
        np.testing.assert_allclose(before, expected)
        if not any(num_verified for num_verified, _ in step):
            continue
        accepted *= FORGETTING
        observed *= FORGETTING
        for num_verified, num_accepted in step:
            for position in range(min(num_verified, num_accepted + 1, MAX_DEPTH)):
                observed[position] += 1
                accepted[position] += position < num_accepted
        expected = accepted + PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        expected /= observed + PRIOR_WEIGHT
    np.testing.assert_allclose(learner.estimate(), expected)


def teach_drafts(model, num_steps, num_reqs, *, slope, intercept, effects=()):
    """Teach what a made-up drafter's confidence means; return the error of each step.

    Its drafts are verified to random lengths and accepted up to the first failure.
    """
    rng, req_ids = np.random.default_rng(0), list(map(str, range(num_reqs)))
    effect = np.array([*effects, *[0.0] * (num_reqs - len(effects))])[:, None]
    errors = []
    for _ in range(num_steps):
        confidence = rng.beta(2, 1, (num_reqs, MAX_DEPTH)).clip(0.05, 0.995)
        truth = to_probability(slope * to_log_odds(confidence) + intercept + effect)
        errors.append(float(np.abs(model.predict(confidence, req_ids) - truth).mean()))
        num_verified = rng.integers(0, MAX_DEPTH + 1, num_reqs)
        passed = rng.random(truth.shape) < truth
        passed &= np.arange(MAX_DEPTH) < num_verified[:, None]
        num_accepted = np.cumprod(passed, axis=1).sum(axis=1)
        model.observe(confidence, req_ids, num_verified, num_accepted)
    return errors


def test_it_learns_an_overconfident_drafter_and_follows_a_shift():
    model = ConfidenceCalibration(MAX_DEPTH)
    errors = teach_drafts(model, 400, 16, slope=0.6, intercept=-1.0)
    assert np.mean(errors[-100:]) < 0.035 < np.mean(errors[:100])
    assert model.calibration_error() < 0.03
    teach_drafts(model, 300, 16, slope=1.0, intercept=1.0)
    # The same requests go from far above to far below the model's mean.
    errors = teach_drafts(model, 300, 16, slope=1.0, intercept=-1.5)
    assert np.mean(errors[-75:]) < 0.06


def test_a_request_that_is_easier_than_the_rest_is_told_apart():
    model = ConfidenceCalibration(MAX_DEPTH)
    teach_drafts(model, 150, 8, slope=1.0, intercept=-0.5, effects=(2.0, -2.0))
    same = np.full((3, MAX_DEPTH), 0.6)
    easy, hard, unknown = model.predict(same, ["0", "1", "new"])[:, 0]
    assert hard + 0.25 < unknown < easy - 0.15
    model.forget("0")
    assert model.predict(same[:1], ["0"])[0, 0] == pytest.approx(unknown)


def test_what_was_not_verified_or_came_after_a_rejection_teaches_nothing():
    model = ConfidenceCalibration(MAX_DEPTH)
    # What was not observed may be anything.
    confidence = np.array([[0.7, 0.7, np.nan, np.inf]] * 2)
    before, none = model.export_state(), np.array([0, 0])
    model.observe(confidence, ["a", "b"], none, none)
    assert model.export_state() == before
    # One draft verified and rejected: positions 1 to 3 were never reached.
    model.observe(confidence, ["a", "b"], np.array([4, 0]), none)
    assert np.count_nonzero(model.export_state()["info_intercept"]) == 1
    extreme = model.predict(np.array([[0.0, 1.0, 1e-12, 1 - 1e-12]]), ["a"])
    assert ((extreme > 0) & (extreme < 1)).all()


@pytest.mark.parametrize(
    ("confidence", "verified", "accepted"),
    [
        *((bad, 2, 1) for bad in (np.nan, np.inf, -0.1, 1.5)),
        *((0.5, *outcome) for outcome in ((2, 3), (2, -1), (-1, 0))),
    ],
)
def test_outcomes_that_cannot_have_happened_are_refused(confidence, verified, accepted):
    model = ConfidenceCalibration(2)
    before = model.export_state()
    given = np.array([[0.5, 0.5], [0.5, confidence]]), ["a", "b"]
    with pytest.raises(ValueError, match="row 1"):
        model.observe(*given, np.array([2, verified]), np.array([2, accepted]))
    assert model.export_state() == before
    assert len(model._requests) == 0


@pytest.mark.parametrize(
    "method", ["draft_model", "eagle", "eagle3", "mtp", "ngram", "suffix", "unheard_of"]
)
def test_no_new_drafter_is_believed_more_than_it_says(method):
    planner = GoodputPlanner.build(3, replace(LIMITS, method=method))
    confidence = np.array([[0.6, 0.8, 0.99]])
    predicted = planner.acceptance.calibration.predict(confidence, ["new"])
    assert ((predicted > 0.0) & (predicted < confidence)).all()


IDS = ("a", "b", "c")
CONFIDENCE = np.array([[0.9, 0.8], [0.6, 0.5], [0.7, 0.2]])


def teach(num_verified, num_accepted, req_ids):
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
def test_an_outcome_of_another_shape_is_refused_and_spoils_no_other(malformed):
    feedback, calibration = DraftFeedback(2), ConfidenceCalibration(2)
    verified, accepted = np.array([[2, 2], [1, 2]])
    outcome = VerificationOutcome(verified, accepted, ("a", "b"), CONFIDENCE[:2])
    feedback.observe(outcome)
    with pytest.raises(ValueError, match="outcomes"):
        feedback.observe(replace(outcome, **malformed))
    feedback.flush(calibration)
    assert calibration.export_state() != ConfidenceCalibration(2).export_state()


def test_outcomes_that_cannot_be_learnt_are_lost_and_the_next_ones_teach():
    """By their own confidence, where an engine selects before it knows the drafts."""
    feedback, calibration = DraftFeedback(2), ConfidenceCalibration(2)
    feedback.note(DraftBatch(np.array([2]), np.full((1, 2), 0.1), ("a",)))
    untaught = calibration.predict(CONFIDENCE, IDS)
    good = VerificationOutcome(np.array([2]), np.array([2]), ("a",), CONFIDENCE[:1])
    feedback.observe(good)
    feedback.observe(replace(good, confidence=np.full((1, 2), np.nan)))
    with pytest.raises(ValueError, match="row 1"):
        feedback.flush(calibration)
    assert calibration.predict(CONFIDENCE, IDS) == pytest.approx(untaught)

    feedback.observe(good)
    feedback.flush(calibration)

    expected = ConfidenceCalibration(2)
    expected.observe(CONFIDENCE[:1], ["a"], np.array([2]), np.array([2]))
    taught = calibration.predict(CONFIDENCE, IDS)
    assert taught == pytest.approx(expected.predict(CONFIDENCE, IDS))
    assert (taught[0] > untaught[0]).all()
