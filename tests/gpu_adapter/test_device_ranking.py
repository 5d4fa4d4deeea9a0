"""The torch twins against the NumPy reference, on tensors of the CPU."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.decisions.select import compute_survival
from policies.decisions.select import select_drafts as reference
from policies.estimators.calibration import ConfidenceCalibration
from serving.engine.gpu.ranking import predict_acceptance, select_drafts

# Few distinct values, so that ties are common; products of powers of two are exact in
# any order and any width. What is no number counts as 0.
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan")])


def make_batch(draw):
    num_reqs = draw(st.integers(1, 6))
    depth = draw(st.integers(1, 5))
    row = st.lists(CONFIDENCES, min_size=depth, max_size=depth)
    confidence = np.array(draw(st.lists(row, min_size=num_reqs, max_size=num_reqs)))
    lengths = st.lists(st.integers(0, depth), min_size=num_reqs, max_size=num_reqs)
    num_drafts = np.array(draw(lengths), dtype=np.int64)
    return confidence, num_drafts, draw(st.integers(0, int(num_drafts.sum())))


batches = st.composite(make_batch)()


@settings(max_examples=300, deadline=None)
@given(batches, st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=6, max_size=6))
def test_the_same_drafts_are_admitted_as_by_the_reference_ties_included(batch, weights):
    confidence, num_drafts, draft_budget = batch
    weight = np.array(weights[: confidence.shape[0]])
    survival = compute_survival(confidence)
    for used, values in ((None, survival), (weight, survival * weight[:, None])):
        drafts = (
            torch.from_numpy(confidence).float(),
            torch.from_numpy(num_drafts).int(),
        )
        own = None if used is None else torch.from_numpy(used).float()
        admitted = select_drafts(*drafts, draft_budget, own)
        assert admitted.dtype == torch.int32
        expected = reference(values, num_drafts, draft_budget)
        assert admitted.tolist() == expected.tolist()


def test_acceptance_is_predicted_as_by_the_calibration():
    rng = np.random.default_rng(0)
    calibration = ConfidenceCalibration(max_depth=4)
    req_ids = [f"r{index}" for index in range(8)]
    for _ in range(20):
        confidence = rng.uniform(0.02, 0.999, (8, 4))
        num_accepted = np.minimum(rng.geometric(0.4, 8) - 1, 4)
        calibration.observe(confidence, req_ids, np.full(8, 4), num_accepted)
    confidence = rng.uniform(0.0, 1.0, (8, 4))
    confidence[0] = [0.0, 1.0, 1e-9, 1.0 - 1e-9]
    scale = calibration.scale(req_ids)
    assert scale.effect.any()
    arrays = confidence, scale.intercept, scale.effect
    tensor, *model = (torch.from_numpy(one).float() for one in arrays)
    predicted = predict_acceptance(tensor, scale.slope, *model, scale.max_log_odds)
    expected = calibration.predict(confidence, req_ids)
    np.testing.assert_allclose(predicted.numpy(), expected, rtol=2e-4, atol=1e-6)
    assert ((predicted > 0) & (predicted < 1)).all()


def test_a_position_never_depends_on_later_ones_of_its_request():
    """An unstable top-k lets a tie behind a position decide about it."""
    lengths, budget = torch.tensor([2, 1]), 1
    for later in (0.0, 0.5, 1.0):
        confidence = torch.tensor([[0.5, later], [0.5, 0.0]])
        assert select_drafts(confidence, lengths, budget).tolist() == [1, 0]
