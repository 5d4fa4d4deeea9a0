"""What recent drafts say of positions that they did not have."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.recent_drafts import RecentDrafts

MAX_DEPTH = 4


def remember(recent: RecentDrafts, acceptance: np.ndarray) -> None:
    lengths = np.full(acceptance.shape[0], acceptance.shape[1])
    recent.remember(acceptance, lengths, None)


def test_the_first_drafts_go_on_as_is_typical():
    recent = RecentDrafts(MAX_DEPTH)
    remember(recent, np.array([[0.5]]))
    typical = np.full(MAX_DEPTH, 0.8)
    tokens = recent.tokens_by_depth(typical)
    assert tokens == pytest.approx([1.0, 1.5, 1.9, 2.22, 2.476])


def test_drafts_that_ended_early_are_not_believed_to_go_on_at_their_best():
    """Half are hopeless: nothing was drafted on for, and the rest is typical."""
    recent = RecentDrafts(MAX_DEPTH)
    for _ in range(8):
        remember(recent, np.array([[0.95], [0.05]] * 6))
    estimate = recent.estimate_depths(np.full(MAX_DEPTH, 0.95))
    # The same drafts, every position of which is as likely to be the one or the other.
    rng = np.random.default_rng(0)
    seen = RecentDrafts(MAX_DEPTH)
    for _ in range(8):
        remember(seen, rng.choice([0.95, 0.05], (12, MAX_DEPTH)))
    expected = seen.estimate_depths(np.full(MAX_DEPTH, 0.95))
    gained, in_full = estimate.gained[:, -1], expected.gained[:, -1]
    assert gained == pytest.approx(in_full, rel=0.25)
    assert gained[MAX_DEPTH] < 1.2


def test_the_same_drafts_are_always_continued_alike():
    estimates = []
    for _ in range(2):
        recent = RecentDrafts(MAX_DEPTH)
        remember(recent, np.linspace(0.1, 0.9, 16)[:, None])
        estimates.append(recent.estimate_depths(np.full(MAX_DEPTH, 0.7)).gained)
    assert (estimates[0] == estimates[1]).all()


def test_malformed_drafts_are_lost_and_the_next_ones_are_remembered():
    recent = RecentDrafts(MAX_DEPTH)
    drafts = np.full((1, MAX_DEPTH), 0.9)
    recent.remember([[0.9], [0.9, 0.8]], np.array([1, 2]), None)
    with pytest.raises(ValueError, match="inhomogeneous"):
        recent.sample_acceptance()

    remember(recent, drafts)

    assert recent.sample_acceptance() == pytest.approx([0.9] * MAX_DEPTH)


def test_requests_without_drafts_leave_the_worth_of_the_others_as_it_is():
    alike, apart = RecentDrafts(MAX_DEPTH), RecentDrafts(MAX_DEPTH)
    drafts, lengths = np.full((2, MAX_DEPTH), 0.6), np.array([MAX_DEPTH, 0])
    alike.remember(drafts, lengths, None)
    apart.remember(drafts, lengths, np.array([1.8, 0.2]))

    expected, seen = (
        r.estimate_depths(np.full(MAX_DEPTH, 0.5)) for r in (alike, apart)
    )

    assert seen.gained == pytest.approx(expected.gained)
    assert seen.thresholds == pytest.approx(expected.thresholds)


def test_drafts_that_are_filed_late_leave_what_filing_each_at_once_leaves():
    rng = np.random.default_rng(8)
    late, at_once = RecentDrafts(MAX_DEPTH), RecentDrafts(MAX_DEPTH)
    for _ in range(7):
        acceptance, lengths = rng.random((40, MAX_DEPTH)), rng.integers(0, 3, 40)
        for recent in (late, at_once):
            recent.remember(acceptance, lengths, None)
        at_once.sample_acceptance()

    typical = np.full(MAX_DEPTH, 0.5)
    late_one, other = (recent.estimate_depths(typical) for recent in (late, at_once))
    assert np.array_equal(late_one.gained, other.gained)
    assert np.array_equal(late_one.thresholds, other.thresholds)
