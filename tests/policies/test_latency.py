"""What latency-bound requests get before all others."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.latency import latest_step_ms, reserve_drafts

SURVIVAL = np.array([[0.9, 0.8, 0.7, 0.6]])
FOUR = np.array([4])


def reserve(target_ms: float, step_ms: float = 40.0, ms_per_draft: float = 1.0) -> int:
    return int(
        reserve_drafts(SURVIVAL, FOUR, np.array([target_ms]), step_ms, ms_per_draft)[0]
    )


@pytest.mark.parametrize(
    ("target_ms", "reserved"),
    # 40 ms a step: 1, 1.9, 2.7, 3.4, 4.0 tokens take 40, 21.1, 14.8, 11.8, 10 ms each.
    [(np.inf, 0), (41.0, 0), (40.0, 0), (25.0, 1), (15.0, 2), (12.0, 3), (1.0, 4)],
)
def test_a_request_claims_as_many_drafts_as_its_target_needs(
    target_ms: float, reserved: int
):
    assert reserve(target_ms) == reserved


def test_a_draft_that_slows_its_own_request_down_is_not_claimed():
    # The first draft brings .9 tokens for 1 token's 40 ms, the second .8 for 1.9's:
    # worth it while it costs less than .8 / 1.9 * 40 = 16.8 ms.
    assert reserve(1.0, ms_per_draft=16.0) == 2
    assert reserve(1.0, ms_per_draft=17.0) == 1


def test_nothing_is_claimed_that_was_not_drafted():
    reserved = reserve_drafts(
        np.tile(SURVIVAL, (3, 1)), np.array([0, 1, 4]), np.full(3, 1.0), 40.0, 0.1
    )
    np.testing.assert_array_equal(reserved, [0, 1, 4])


def test_a_claim_depends_on_nothing_behind_it():
    rng = np.random.default_rng(0)
    for _ in range(200):
        survival = np.cumprod(rng.random((5, 4)), axis=1)
        target_ms, cost_ms = rng.uniform(5, 40, 5), rng.uniform(0, 10)
        before = reserve_drafts(survival, np.full(5, 4), target_ms, 40.0, cost_ms)
        position = rng.integers(1, 4)
        survival[:, position:] *= rng.random((5, 1))
        after = reserve_drafts(survival, np.full(5, 4), target_ms, 40.0, cost_ms)
        np.testing.assert_array_equal(
            np.minimum(before, position), np.minimum(after, position)
        )


def test_the_tightest_target_within_reach_limits_the_step():
    tokens, targets_ms = np.array([2.0, 1.0, 1.0]), np.array([20.0, 45.0, np.inf])
    assert latest_step_ms(tokens, targets_ms, fastest_ms=30.0) == 40.0
    assert latest_step_ms(tokens, targets_ms, fastest_ms=42.0) == 45.0
    assert latest_step_ms(tokens, targets_ms, fastest_ms=50.0) == np.inf
