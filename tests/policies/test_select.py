"""Draft selection against a sorted list, and the properties it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from policies.decisions.select import blank_past, compute_survival, select_drafts

NAN, INF = np.nan, np.inf
# Few values, so that ties, rises and unknown ones are hit all the time.
VALUES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, NAN, -INF])


@st.composite
def batches(draw):
    """Draw what may pass for survival, and ragged lengths."""
    shape = draw(st.tuples(st.integers(0, 5), st.integers(0, 4)))
    survival = draw(arrays(np.float64, shape, elements=VALUES, fill=st.nothing()))
    lengths = draw(arrays(np.int64, shape[:1], elements=st.integers(0, shape[1])))
    is_small = draw(st.booleans())
    return (
        survival.astype(np.float32 if is_small else np.float64),
        lengths.astype(np.int32 if is_small else np.int64),
    )


@given(batches())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_drafts_are_admitted_one_by_one_where_survival_is_largest(batch):
    """Ties go to the shallower position, then to the lower request.

    NaN counts as 0, a rise is flattened, and nothing past a length is there.
    """
    survival, lengths = batch
    before = survival.copy(), lengths.copy()
    clean = np.minimum.accumulate(np.nan_to_num(survival, neginf=0.0), axis=1)
    order = sorted(
        (-clean[request, position], position, request)
        for request, length in enumerate(lengths)
        for position in range(length)
    )
    for draft_budget in range(len(order) + 2):
        expected = np.zeros(lengths.size, dtype=np.int64)
        for _, _, request in order[:draft_budget]:
            expected[request] += 1
        admitted = select_drafts(survival, lengths, draft_budget)
        np.testing.assert_array_equal(admitted, expected)
        assert admitted.dtype == np.int64
        admitted += 1
    np.testing.assert_array_equal(survival, before[0])
    np.testing.assert_array_equal(lengths, before[1])


@pytest.mark.parametrize(
    ("survival", "lengths", "draft_budget", "message"),
    [
        (np.zeros(3), [1, 1, 1], 1, r"\[num_reqs, max_depth\]"),
        (np.zeros((2, 2)), [1, 1, 1], 1, "one length per request"),
        (np.zeros((2, 2)), [1, 3], 1, r"0\.\.2 .* got 1\.\.3"),
        (np.zeros((2, 2)), [-1, 2], 1, r"0\.\.2 .* got -1\.\.2"),
        (np.zeros((2, 2)), [1, 1], -1, "draft_budget must be >= 0, got -1"),
    ],
)
def test_impossible_inputs_are_refused(survival, lengths, draft_budget, message):
    with pytest.raises(ValueError, match=message):
        select_drafts(survival, np.array(lengths), draft_budget)


def test_survival_is_the_running_product_of_what_acceptance_can_be():
    rows = [[0.5, 0.5, 1.0], [1.5, -0.5, 0.5], [NAN, 1.0, 1.0], [INF, 0.5, -INF]]
    products = [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.5, 0.0]]
    acceptance = np.array(rows)
    np.testing.assert_allclose(compute_survival(acceptance), products)
    np.testing.assert_array_equal(acceptance, rows)


@pytest.mark.parametrize("unusable", [NAN, INF, -INF, -0.1, 1.1])
def test_what_lies_past_a_draft_is_blanked_and_not_judged(unusable):
    confidence = np.array([[0.5, unusable], [0.25, 0.75]])
    blanked, is_usable = blank_past(confidence, np.array([1, 2]))
    assert is_usable.tolist() == [True, True]
    assert blanked.tolist() == [[0.5, 0.0], [0.25, 0.75]]
    assert blank_past(confidence, np.array([2, 2]))[1].tolist() == [False, True]
    assert confidence[1].tolist() == [0.25, 0.75]
    # A probability rounded past 1 is 1, and one that is missing is not read.
    above = float(np.nextafter(np.float32(1), np.float32(2)))
    blanked, is_usable = blank_past(np.array([[above], [0.25]]), np.array([3, 1]))
    assert is_usable.all()
    assert blanked.tolist() == [[1.0], [0.25]]
