"""Planners: what each policy verifies, how deep it drafts, and what it learns."""

from __future__ import annotations

import numpy as np
import pytest

from policies.planner import Planner
from policies.registry import POLICY_NAMES, build_planner
from policies.types import DraftBatch, PolicySpec, VerificationOutcome


def make_batch(
    lengths: list[int], confidence: list[list[float]] | None = None
) -> DraftBatch:
    """Build a batch; no confidence means a drafter without logits."""
    return DraftBatch(
        num_draft_tokens=np.array(lengths, dtype=np.int64),
        confidence=None if confidence is None else np.array(confidence),
    )


def make_planner(
    name: str, draft_tokens: int = 2, max_draft_tokens: int = 4
) -> Planner:
    spec = PolicySpec(name, draft_tokens, max_draft_tokens=max_draft_tokens)
    return build_planner(spec)


def test_fixed_verifies_every_draft():
    selection = make_planner("fixed").select(make_batch([2, 0, 1]))
    np.testing.assert_array_equal(selection.num_admitted, [2, 0, 1])
    assert selection.draft_budget == 3


def test_fixed_drafts_its_constant_depth_and_ignores_the_largest():
    planner = make_planner("fixed", draft_tokens=3, max_draft_tokens=8)
    assert [planner.choose_depth(n) for n in (0, 1, 64)] == [3, 3, 3]
    assert PolicySpec("fixed", 3, max_draft_tokens=8).max_depth == 3


def test_tetris_drafts_deeper_than_it_verifies():
    planner = make_planner("tetris", draft_tokens=3, max_draft_tokens=8)
    assert [planner.choose_depth(n) for n in (0, 1, 64)] == [8, 8, 8]
    assert PolicySpec("tetris", 3, max_draft_tokens=8).max_depth == 8


def test_tetris_spends_k_per_drafting_request_where_survival_is_largest():
    confidence = [[0.9, 0.9, 0.9, 0.9], [0.1, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]]
    selection = make_planner("tetris").select(make_batch([4, 4, 4], confidence))
    # Survival: .9 .81 .729 .656 | .1 .09 .081 .073 | .5 .25 .125 .0625; six places.
    assert selection.draft_budget == 6
    np.testing.assert_array_equal(selection.num_admitted, [4, 0, 2])


def test_requests_without_drafts_add_nothing_to_the_budget():
    selection = make_planner("tetris").select(
        make_batch([4, 0, 0], [[0.9, 0.8, 0.7, 0.6], [0.0] * 4, [0.0] * 4])
    )
    assert selection.draft_budget == 2
    np.testing.assert_array_equal(selection.num_admitted, [2, 0, 0])


def test_places_a_short_draft_leaves_go_to_the_others():
    """An ngram request that found one match frees its second place."""
    selection = make_planner("tetris").select(make_batch([1, 4]))
    assert selection.draft_budget == 4
    np.testing.assert_array_equal(selection.num_admitted, [1, 3])


def test_an_empty_batch_selects_nothing():
    for name in ("fixed", "tetris"):
        selection = make_planner(name).select(make_batch([]))
        assert selection.num_admitted.shape == (0,)
        assert selection.draft_budget == 0


def test_without_confidence_tetris_prefers_shallow_positions():
    selection = make_planner("tetris").select(make_batch([4, 4, 4]))
    np.testing.assert_array_equal(selection.num_admitted, [2, 2, 2])


def test_without_confidence_every_request_gets_the_learnt_survival():
    planner = make_planner("tetris", draft_tokens=1, max_draft_tokens=3)
    for _ in range(100):
        planner.observe(
            VerificationOutcome(
                num_verified=np.array([3, 3]), num_accepted=np.array([3, 1])
            )
        )
    survival = planner._survival(make_batch([3, 1]))
    # Position 0 always held, position 1 half of the time, position 2 whenever
    # position 1 did.
    np.testing.assert_allclose(survival[0], [1.0, 0.5, 0.5], atol=0.05)
    np.testing.assert_array_equal(survival[0], survival[1])


def test_confidence_wins_over_what_was_learnt():
    planner = make_planner("tetris", draft_tokens=1, max_draft_tokens=2)
    for _ in range(50):
        planner.observe(
            VerificationOutcome(num_verified=np.array([2]), num_accepted=np.array([0]))
        )
    selection = planner.select(make_batch([2, 2], [[0.2, 0.2], [0.9, 0.9]]))
    np.testing.assert_array_equal(selection.num_admitted, [0, 2])


def test_selecting_changes_neither_the_batch_nor_the_planner():
    planner = make_planner("tetris")
    batch = make_batch([4, 4], [[0.9, np.nan, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]])
    confidence = batch.confidence.copy()
    first = planner.select(batch)
    second = planner.select(batch)
    np.testing.assert_array_equal(first.num_admitted, second.num_admitted)
    np.testing.assert_array_equal(batch.confidence, confidence)
    np.testing.assert_array_equal(batch.num_draft_tokens, [4, 4])


def test_the_deepest_draft_of_an_empty_batch_is_zero():
    assert make_batch([]).max_depth == 0
    assert make_batch([1, 3]).max_depth == 3
    assert make_batch([1, 3]).num_reqs == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PolicySpec("fixed", 0), "draft_tokens must be >= 1, got 0"),
        (PolicySpec("goodput"), "max_draft_tokens must be >= 1, got 0"),
        (
            PolicySpec("tetris", 2, max_draft_tokens=1),
            "max_draft_tokens must be >= 2, got 1",
        ),
        (
            PolicySpec("oracle", max_draft_tokens=2),
            r"'oracle' has no planner; .*'fixed', .*'tetris'",
        ),
        (PolicySpec("none", max_draft_tokens=2), "'none' has no planner"),
    ],
)
def test_unknown_names_and_numbers_are_refused_by_value(spec, message):
    with pytest.raises(ValueError, match=message):
        build_planner(spec)


def test_every_named_policy_but_none_has_a_planner():
    assert POLICY_NAMES[0] == "none"
    for name in POLICY_NAMES[1:]:
        assert (
            build_planner(PolicySpec(name, 1, max_draft_tokens=1)).choose_depth(1) >= 1
        )
