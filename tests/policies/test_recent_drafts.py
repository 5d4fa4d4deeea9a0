"""What recent drafts say of positions that they did not have."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.recent_drafts import RecentDrafts

MAX_DEPTH = 4


def remembering(*drafts: np.ndarray) -> RecentDrafts:
    recent = RecentDrafts(MAX_DEPTH)
    for acceptance in drafts:
        num_reqs, depth = acceptance.shape
        recent.remember(acceptance, np.full(num_reqs, depth), None)
    return recent


def test_the_first_drafts_go_on_as_is_typical():
    tokens = remembering(np.array([[0.5]])).tokens_by_depth(np.full(MAX_DEPTH, 0.8))
    assert tokens == pytest.approx([1.0, 1.5, 1.9, 2.22, 2.476])


def test_drafts_that_ended_early_are_not_believed_to_go_on_at_their_best():
    """Half are hopeless: nothing was drafted on for, and the rest is typical."""
    typical = np.full(MAX_DEPTH, 0.95)
    ended = remembering(*8 * [np.array([[0.95], [0.05]] * 6)])
    # The same drafts, every position of which is as likely to be the one or the other.
    rng = np.random.default_rng(0)
    seen = remembering(*(rng.choice([0.95, 0.05], (12, MAX_DEPTH)) for _ in range(8)))
    gained, in_full = (
        one.estimate_depths(typical).gained[:, -1] for one in (ended, seen)
    )
    assert gained == pytest.approx(in_full, rel=0.25)
    assert gained[MAX_DEPTH] < 1.2


def test_malformed_drafts_are_lost_and_the_next_ones_are_remembered():
    recent = RecentDrafts(MAX_DEPTH)
    recent.remember([[0.9], [0.9, 0.8]], np.array([1, 2]), None)
    with pytest.raises(ValueError, match="inhomogeneous"):
        recent.sample_acceptance()

    recent.remember(np.full((1, MAX_DEPTH), 0.9), np.array([MAX_DEPTH]), None)

    assert recent.sample_acceptance() == pytest.approx([0.9] * MAX_DEPTH)


def test_requests_without_drafts_leave_the_worth_of_the_others_as_it_is():
    alike, apart = RecentDrafts(MAX_DEPTH), RecentDrafts(MAX_DEPTH)
    drafts, lengths = np.full((2, MAX_DEPTH), 0.6), np.array([MAX_DEPTH, 0])
    alike.remember(drafts, lengths, None)
    apart.remember(drafts, lengths, np.array([1.8, 0.2]))
    check_same(alike, apart)


def test_drafts_that_are_filed_late_leave_what_filing_each_at_once_leaves():
    """And the same drafts are always continued alike."""
    rng = np.random.default_rng(8)
    late, at_once = RecentDrafts(MAX_DEPTH), RecentDrafts(MAX_DEPTH)
    for _ in range(7):
        acceptance, lengths = rng.random((40, MAX_DEPTH)), rng.integers(0, 3, 40)
        for recent in (late, at_once):
            recent.remember(acceptance, lengths, None)
        at_once.sample_acceptance()
    check_same(late, at_once)


def check_same(one: RecentDrafts, other: RecentDrafts) -> None:
    typical = np.full(MAX_DEPTH, 0.5)
    seen, expected = (recent.estimate_depths(typical) for recent in (one, other))
    assert seen.gained == pytest.approx(expected.gained)
    assert seen.thresholds == pytest.approx(expected.thresholds)
