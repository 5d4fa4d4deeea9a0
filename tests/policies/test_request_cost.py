"""What a step costs by its requests, against the same filter in matrices."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.estimators import request_cost
from policies.estimators.request_cost import RequestCost

STEPS = st.tuples(
    st.floats(1e-3, 1e5),
    st.integers(1, 300),
    st.one_of(st.just(0), st.integers(0, 9999)),
)


def drifted(costs, covariance):
    """Return the covariance after the costs have wandered for a step."""
    covariance = covariance + request_cost._LEVEL_WANDER**2 * np.outer(costs, costs)
    covariance += np.diag((request_cost._OWN_WANDER * costs) ** 2)
    deviation = np.sqrt(np.diag(covariance))
    largest = request_cost._MAX_DOUBT * np.maximum(costs, 1e-3 * costs.max())
    shrink = np.minimum(1.0, largest / np.maximum(deviation, 1e-300))
    return covariance * np.outer(shrink, shrink)


def followed(costs, covariance, step_ms, shares):
    """Return costs and covariance after one more step."""
    covariance = drifted(costs, covariance)
    expected_ms = shares @ costs
    noise = (request_cost._NOISE * max(expected_ms, 1e-6)) ** 2
    spread = covariance @ shares
    variance = shares @ spread + noise
    limit = request_cost._MAX_SURPRISE * math.sqrt(variance)
    gain = spread / variance
    costs = costs + gain * np.clip(step_ms - expected_ms, -limit, limit)
    keep = np.eye(3) - np.outer(gain, shares)
    covariance = keep @ covariance @ keep.T + noise * np.outer(gain, gain)
    return np.maximum(costs, 1e-9 * expected_ms), covariance


@given(st.lists(STEPS, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_compiled_filter_is_the_one_in_matrices(steps):
    learnt, costs, covariance = RequestCost(), None, None
    for step_ms, num_requests, num_prompt_tokens in steps:
        learnt.observe_step(step_ms, num_requests, num_prompt_tokens)
        if costs is None:
            costs, covariance = np.array(learnt.costs_ms), learnt._covariance.copy()
            continue
        shares = np.array([1.0, num_requests, num_prompt_tokens])
        costs, covariance = followed(costs, covariance, step_ms, shares)
    largest = np.abs(covariance).max()
    np.testing.assert_allclose(learnt.costs_ms, costs, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        learnt._covariance, covariance, rtol=1e-6, atol=1e-12 * largest
    )
