"""Learnt acceptance per position, against its definition."""

from __future__ import annotations

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
from policies.types import VerificationOutcome

MAX_DEPTH = 3

# (verified, accepted) of each request in each step; some deeper than is learnt.
STEPS = st.lists(
    st.lists(
        st.integers(0, MAX_DEPTH + 2).flatmap(
            lambda verified: st.tuples(st.just(verified), st.integers(0, verified))
        ),
        max_size=4,
    ),
    max_size=8,
)


def observe(learner: PositionAcceptance, step: list[tuple[int, int]]) -> None:
    verified, accepted = np.array(step, dtype=np.int64).reshape(-1, 2).T
    learner.observe(VerificationOutcome(verified, accepted))


@given(STEPS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_position_is_judged_by_the_outcomes_that_reached_it(
    steps: list[list[tuple[int, int]]],
):
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


def test_it_learns_what_is_true_and_unlearns_it_when_the_text_changes():
    learner = PositionAcceptance(1)
    for num_accepted in (1, 0):
        for _ in range(1000):
            observe(learner, [(1, num_accepted)] * 8)
        assert abs(learner.estimate()[0] - num_accepted) < 0.01


def test_a_depth_below_one_is_refused():
    with pytest.raises(ValueError, match="max_depth must be >= 1, got 0"):
        PositionAcceptance(0)
