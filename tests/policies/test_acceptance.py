"""Learnt acceptance per position: what it converges to and what it ignores."""

from __future__ import annotations

import numpy as np
import pytest

from policies.estimators.acceptance import (
    FORGETTING,
    PRIOR_ACCEPTANCE,
    PositionAcceptance,
)
from policies.types import VerificationOutcome


def outcome(*pairs: tuple[int, int]) -> VerificationOutcome:
    """Build an outcome from (verified, accepted) pairs, one per request."""
    verified, accepted = zip(*pairs, strict=True)
    return VerificationOutcome(
        num_verified=np.array(verified, dtype=np.int64),
        num_accepted=np.array(accepted, dtype=np.int64),
    )


def draw_outcome(
    rng: np.random.Generator, acceptance: np.ndarray, num_reqs: int
) -> VerificationOutcome:
    """Verify full blocks whose positions are accepted with known probability."""
    accepted = (rng.random((num_reqs, acceptance.size)) < acceptance).cumprod(axis=1)
    return VerificationOutcome(
        num_verified=np.full(num_reqs, acceptance.size),
        num_accepted=accepted.sum(axis=1),
    )


def test_every_position_starts_at_the_prior():
    np.testing.assert_array_equal(
        PositionAcceptance(3).estimate(), np.full(3, PRIOR_ACCEPTANCE)
    )


def test_it_learns_the_acceptance_of_each_position():
    truth = np.array([0.9, 0.7, 0.3])
    rng = np.random.default_rng(0)
    learner = PositionAcceptance(3)
    for _ in range(400):
        learner.observe(draw_outcome(rng, truth, num_reqs=16))
    # A memory of 200 steps holds 200 x 16 x .9 x .7 = 2016 tokens at position 2,
    # whose mean is off by sqrt(.3 x .7 / 2016) = 0.01 in standard deviation.
    np.testing.assert_allclose(learner.estimate(), truth, atol=0.04)


def test_acceptance_is_given_that_everything_before_was_accepted():
    """Not survival: a position seldom reached is judged by the times it was."""
    learner = PositionAcceptance(2)
    for _ in range(200):
        learner.observe(outcome((2, 0), (2, 0), (2, 0), (2, 2)))
    first, second = learner.estimate()
    assert first == pytest.approx(0.25, abs=0.02)
    assert second > 0.95


def test_positions_behind_the_first_rejection_teach_nothing():
    learner = PositionAcceptance(4)
    before = learner.estimate()
    learner.observe(outcome((4, 1)))
    after = learner.estimate()
    assert after[0] > before[0]
    assert after[1] < before[1]
    np.testing.assert_array_equal(after[2:], before[2:])


def test_positions_that_were_not_verified_teach_nothing():
    """All two verified drafts accepted says nothing about the third."""
    learner = PositionAcceptance(4)
    before = learner.estimate()
    learner.observe(outcome((2, 2)))
    np.testing.assert_array_equal(learner.estimate()[2:], before[2:])


def test_a_request_without_verified_drafts_teaches_nothing():
    learner = PositionAcceptance(2)
    learner.observe(outcome((0, 0)))
    np.testing.assert_array_equal(learner.estimate(), PositionAcceptance(2).estimate())


def test_positions_past_the_deepest_known_one_are_ignored():
    learner = PositionAcceptance(2)
    learner.observe(outcome((5, 5)))
    assert learner.estimate().shape == (2,)


def test_a_few_outcomes_move_the_prior_only_a_little():
    learner = PositionAcceptance(1)
    learner.observe(outcome((1, 1)))
    # (1 + 0.5 x 4) / (1 + 4)
    assert learner.estimate()[0] == pytest.approx(0.6)


def test_old_outcomes_are_forgotten_when_the_text_changes():
    learner = PositionAcceptance(1)
    for _ in range(1000):
        learner.observe(outcome(*[(1, 1)] * 8))
    assert learner.estimate()[0] > 0.99
    # After one memory, exp(-1) = 37 % of the weight still says "accepted".
    for _ in range(round(1 / (1 - FORGETTING))):
        learner.observe(outcome(*[(1, 0)] * 8))
    assert learner.estimate()[0] == pytest.approx(0.37, abs=0.02)
    for _ in range(1000):
        learner.observe(outcome(*[(1, 0)] * 8))
    assert learner.estimate()[0] < 0.01


def test_estimates_stay_strictly_between_never_and_always():
    learner = PositionAcceptance(2)
    for _ in range(2000):
        learner.observe(outcome(*[(2, 1)] * 64))
    assert (learner.estimate() > 0).all()
    assert (learner.estimate() < 1).all()


def test_an_estimate_is_not_changed_by_what_is_learnt_later():
    learner = PositionAcceptance(1)
    frozen = learner.estimate()
    learner.observe(outcome((1, 1)))
    np.testing.assert_array_equal(frozen, [PRIOR_ACCEPTANCE])


def test_a_depth_below_one_is_refused():
    with pytest.raises(ValueError, match="max_depth must be >= 1, got 0"):
        PositionAcceptance(0)


def test_steps_that_verify_nothing_forget_nothing():
    learner = PositionAcceptance(2)
    for _ in range(200):
        learner.observe(outcome((2, 1), (2, 2)))
    before = learner.estimate()
    nothing = np.empty(0, dtype=np.int64)
    for _ in range(400):
        learner.observe(outcome((0, 0)))
        learner.observe(VerificationOutcome(nothing, nothing))
    np.testing.assert_array_equal(learner.estimate(), before)
