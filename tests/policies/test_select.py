"""Draft selection against exhaustive search, and the properties it promises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from policies.decisions.select import (
    blank_past,
    compute_survival,
    count_admitted,
    select_drafts,
    sum_prefixes,
)

SEEDS = range(40)


def make_batch(
    seed: int, *, num_reqs: int = 4, max_depth: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Draw survival and ragged lengths; ties have probability 0."""
    rng = np.random.default_rng(seed)
    survival = compute_survival(rng.random((num_reqs, max_depth)))
    return survival, rng.integers(0, max_depth + 1, num_reqs)


def count_expected_tokens(survival: np.ndarray, admitted: np.ndarray) -> float:
    """Expected accepted tokens of an allocation: the survival it covers."""
    return float(sum(survival[i, :n].sum() for i, n in enumerate(admitted)))


def find_best_expectation(
    survival: np.ndarray, lengths: np.ndarray, draft_budget: int
) -> float:
    """Try every allocation of prefixes under the budget."""
    allocations = product(*(range(n + 1) for n in lengths))
    return max(
        count_expected_tokens(survival, np.array(allocation))
        for allocation in allocations
        if sum(allocation) <= draft_budget
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_no_allocation_under_the_budget_expects_more_accepted_tokens(seed):
    survival, lengths = make_batch(seed)
    for draft_budget in range(int(lengths.sum()) + 2):
        admitted = select_drafts(survival, lengths, draft_budget)
        assert count_expected_tokens(survival, admitted) == pytest.approx(
            find_best_expectation(survival, lengths, draft_budget)
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_budget_is_spent_exactly_or_every_draft_is_admitted(seed):
    survival, lengths = make_batch(seed, num_reqs=7, max_depth=5)
    num_drafts = int(lengths.sum())
    for draft_budget in range(num_drafts + 3):
        admitted = select_drafts(survival, lengths, draft_budget)
        assert admitted.sum() == min(draft_budget, num_drafts)
        assert (admitted >= 0).all()
        assert (admitted <= lengths).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_reordering_requests_reorders_the_selection(seed):
    survival, lengths = make_batch(seed, num_reqs=8, max_depth=4)
    order = np.random.default_rng(seed).permutation(8)
    admitted = select_drafts(survival, lengths, 9)
    reordered = select_drafts(survival[order], lengths[order], 9)
    np.testing.assert_array_equal(reordered, admitted[order])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_larger_budget_never_takes_a_draft_back(seed):
    survival, lengths = make_batch(seed, num_reqs=6, max_depth=4)
    previous = np.zeros_like(lengths)
    for draft_budget in range(int(lengths.sum()) + 1):
        admitted = select_drafts(survival, lengths, draft_budget)
        assert (admitted >= previous).all()
        previous = admitted


@pytest.mark.parametrize("seed", SEEDS)
def test_whether_a_position_is_admitted_ignores_what_comes_behind_it(seed):
    """The property that keeps sampled output distributed as the target's.

    Everything behind position j of one request is replaced, by survivals that tie
    with other drafts too; whether j itself is admitted must stay as it was.
    """
    rng = np.random.default_rng(seed)
    # Few distinct values, so that ties and the threshold are hit all the time.
    survival = compute_survival(rng.choice([0.0, 0.5, 1.0, np.nan], size=(5, 4)))
    lengths = rng.integers(1, 5, 5)
    for request, position in product(range(5), range(4)):
        if position >= lengths[request]:
            continue
        changed = survival.copy()
        behind = rng.choice([0.0, 0.25, 0.5, 1.0], size=4 - position - 1)
        changed[request, position + 1 :] = survival[request, position] * behind
        for draft_budget in range(int(lengths.sum()) + 1):
            before = select_drafts(survival, lengths, draft_budget)[request]
            after = select_drafts(changed, lengths, draft_budget)[request]
            assert (before > position) == (after > position)


def test_ragged_requests_offer_only_the_drafts_they_have():
    # The second request's column 1 would win, but it drafted a single token.
    survival = np.array([[0.5, 0.4, 0.3], [0.9, 0.9, 0.9], [0.0, 0.0, 0.0]])
    lengths = np.array([3, 1, 0])
    np.testing.assert_array_equal(select_drafts(survival, lengths, 3), [2, 1, 0])


def test_what_lies_past_a_requests_length_is_never_read():
    survival = np.array([[0.5, np.nan, np.inf], [0.4, -1.0, 7.0]])
    lengths = np.array([1, 1])
    np.testing.assert_array_equal(select_drafts(survival, lengths, 1), [1, 0])


def test_an_empty_batch_selects_nothing():
    admitted = select_drafts(np.empty((0, 4)), np.empty(0, dtype=np.int64), 5)
    assert admitted.shape == (0,)
    assert admitted.dtype == np.int64


def test_requests_without_drafts_select_nothing():
    admitted = select_drafts(np.empty((3, 0)), np.zeros(3, dtype=np.int64), 5)
    np.testing.assert_array_equal(admitted, [0, 0, 0])


def test_a_zero_budget_admits_nothing():
    survival, lengths = make_batch(0)
    np.testing.assert_array_equal(select_drafts(survival, lengths, 0), [0, 0, 0, 0])


def test_drafts_with_no_chance_still_fill_the_budget():
    admitted = select_drafts(np.zeros((2, 2)), np.array([2, 2]), 3)
    assert admitted.sum() == 3


def test_ties_go_to_the_shallower_position_then_to_the_lower_request():
    survival = np.full((3, 3), 0.5)
    lengths = np.array([3, 3, 3])
    expected = {
        1: [1, 0, 0],
        2: [1, 1, 0],
        3: [1, 1, 1],
        4: [2, 1, 1],
        7: [3, 2, 2],
    }
    for draft_budget, admitted in expected.items():
        np.testing.assert_array_equal(
            select_drafts(survival, lengths, draft_budget), admitted
        )


def test_a_tie_deeper_in_an_earlier_request_loses_to_a_shallow_one():
    survival = np.array([[0.9, 0.5, 0.5], [0.5, 0.1, 0.1]])
    # 0.9 first; then three drafts at 0.5, of which request 1 holds the shallowest.
    np.testing.assert_array_equal(select_drafts(survival, np.array([3, 3]), 2), [1, 1])


def test_unknown_survival_ranks_last_together_with_everything_behind_it():
    survival = np.array([[np.nan, 0.9, 0.9], [0.2, 0.1, 0.0]])
    lengths = np.array([3, 2])
    np.testing.assert_array_equal(select_drafts(survival, lengths, 2), [0, 2])
    np.testing.assert_array_equal(select_drafts(survival, lengths, 3), [1, 2])


def test_survival_that_rises_is_flattened_to_what_came_before():
    # Taken at face value, 0.9 at position 1 would drag 0.1 in with it.
    survival = np.array([[0.1, 0.9], [0.3, 0.2]])
    np.testing.assert_array_equal(select_drafts(survival, np.array([2, 2]), 2), [0, 2])


def test_inputs_are_left_as_they_were():
    survival = np.array([[0.2, 0.8], [np.nan, 0.5]])
    lengths = np.array([2, 2])
    kept_survival, kept_lengths = survival.copy(), lengths.copy()
    admitted = select_drafts(survival, lengths, 2)
    everything = select_drafts(survival, lengths, 4)
    everything += 1
    admitted += 1
    np.testing.assert_array_equal(survival, kept_survival)
    np.testing.assert_array_equal(lengths, kept_lengths)


def test_narrow_floats_and_integers_are_accepted():
    survival = np.array([[0.5, 0.25], [0.75, 0.5]], dtype=np.float32)
    admitted = select_drafts(survival, np.array([2, 2], dtype=np.int32), 2)
    np.testing.assert_array_equal(admitted, [1, 1])
    assert admitted.dtype == np.int64


@pytest.mark.parametrize(
    ("survival", "lengths", "draft_budget", "message"),
    [
        (np.zeros(3), np.array([1, 1, 1]), 1, r"\[num_reqs, max_depth\]"),
        (np.zeros((2, 2)), np.array([1, 1, 1]), 1, "one length per request"),
        (np.zeros((2, 2)), np.array([1, 3]), 1, r"0\.\.2 .* got 1\.\.3"),
        (np.zeros((2, 2)), np.array([-1, 2]), 1, r"0\.\.2 .* got -1\.\.2"),
        (np.zeros((2, 2)), np.array([1, 1]), -1, "draft_budget must be >= 0, got -1"),
    ],
)
def test_impossible_inputs_are_refused_by_value(
    survival, lengths, draft_budget, message
):
    with pytest.raises(ValueError, match=message):
        select_drafts(survival, lengths, draft_budget)


def test_survival_is_the_running_product_of_acceptance():
    acceptance = np.array([[0.5, 0.5, 1.0], [1.0, 0.25, 0.0]])
    np.testing.assert_allclose(
        compute_survival(acceptance), [[0.5, 0.25, 0.25], [1.0, 0.25, 0.0]]
    )


def test_acceptance_outside_its_range_is_clipped_and_unknown_counts_as_none():
    acceptance = np.array(
        [[1.5, -0.5, 0.5], [np.nan, 1.0, 1.0], [np.inf, 0.5, -np.inf]]
    )
    np.testing.assert_allclose(
        compute_survival(acceptance),
        [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.5, 0.0]],
    )


def test_survival_leaves_acceptance_as_it_was():
    acceptance = np.array([[0.5, np.nan]])
    compute_survival(acceptance)
    np.testing.assert_array_equal(acceptance, [[0.5, np.nan]])


def test_what_is_admitted_and_expected_adds_up():
    rng = np.random.default_rng(5)
    survival = compute_survival(rng.random((6, 4)))
    num_admitted = rng.integers(0, 5, 6)

    count, expected = count_admitted(survival, num_admitted)

    assert count == num_admitted.sum()
    assert expected == pytest.approx(sum_prefixes(survival, num_admitted).sum())


@pytest.mark.parametrize("unusable", [np.nan, np.inf, -np.inf, -0.1, 1.1])
def test_what_lies_past_a_draft_is_blanked_and_not_judged(unusable):
    confidence = np.array([[0.5, unusable], [0.25, 0.75]])

    blanked, is_usable = blank_past(confidence, np.array([1, 2]))
    assert is_usable.tolist() == [True, True]
    assert blanked.tolist() == [[0.5, 0.0], [0.25, 0.75]]
    assert blank_past(confidence, np.array([2, 2]))[1].tolist() == [False, True]
    assert confidence[1].tolist() == [0.25, 0.75]


def test_a_probability_that_was_rounded_past_1_is_1():
    above = float(np.nextafter(np.float32(1), np.float32(2)))

    blanked, is_usable = blank_past(np.array([[above]]), np.array([1]))

    assert is_usable.all()
    assert blanked.tolist() == [[1.0]]


def test_confidences_that_are_missing_are_not_read():
    blanked, is_usable = blank_past(np.array([[0.5], [0.25]]), np.array([3, 1]))

    assert is_usable.all()
    assert blanked.tolist() == [[0.5], [0.25]]
