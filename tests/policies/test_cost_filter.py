"""What no series of timings may do to what is known about prices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.estimators.cost_table import CostTable

COUNTS = np.arange(1.0, 513.0)


def check(table: CostTable) -> None:
    """Assert that prices and what is known about them make sense."""
    prices = table.predict(COUNTS)
    assert np.isfinite(prices).all()
    assert prices[0] > 0.0
    # Rounding between two equal knots moves the last digit.
    assert (np.diff(prices) >= -1e-12 * prices[1:]).all()
    assert 0.0 <= table.slope_ms < math.inf
    covariance = table._covariance
    assert (covariance == covariance.T).all()
    # As correlations, for variances differ by twenty orders of magnitude.
    scale = np.sqrt(covariance.diagonal())
    scale[scale == 0.0] = 1.0
    assert np.linalg.eigvalsh(covariance / np.outer(scale, scale)).min() > -1e-6


def make_table(*, has_profile: bool, has_context: bool) -> CostTable:
    table = CostTable(256, first_ms=20.0, per_unit_ms=0.5, has_context=has_context)
    if has_profile:
        table.fit_profile((1, 64, 256), (12.0, 40.0, 130.0))
    return table


@given(
    samples=st.lists(
        st.tuples(
            st.integers(1, 400),
            st.floats(0.0, exclude_min=True, allow_infinity=False),
            st.integers(0, 10**6),
        ),
        max_size=60,
    ),
    has_profile=st.booleans(),
    has_context=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_timings_in_any_order_break_the_filter(
    samples: list[tuple[int, float, int]], has_profile: bool, has_context: bool
):
    table = make_table(has_profile=has_profile, has_context=has_context)
    other = CostTable(64, first_ms=2.0, per_unit_ms=0.05)
    for count, measured_ms, num_context_tokens in samples:
        other.rescale(table.observe(count, measured_ms, num_context_tokens))
        check(table)
    check(other)


# Each once made context cheaper than nothing; about one seed in 60 did.
@pytest.mark.parametrize("seed", [98, 185, 289, 290, 292, 312])
def test_a_neighbour_that_comes_and_goes_leaves_prices_that_make_sense(seed: int):
    rng = np.random.default_rng(seed)
    table = make_table(has_profile=bool(rng.random() < 0.6), has_context=True)
    first_ms, token_ms = rng.uniform(1.0, 60.0), rng.uniform(0.01, 2.0)
    context_ms = rng.choice([0.0, 1e-4, 1e-3, 5e-3])
    neighbour_ms, is_there = rng.uniform(15.0, 380.0), False
    pace, noise = 10 ** rng.uniform(-2.0, -0.1), 10 ** rng.uniform(-3.0, -0.3)
    # Of three sizes or of any, as batches are while a load holds or changes.
    counts = rng.integers(1, 256, 3) if rng.random() < 0.5 else np.arange(1, 64)
    for step in range(400):
        is_there ^= bool(rng.random() < pace)
        count = int(rng.choice(counts))
        context = count * int(rng.integers(1, 2000))
        exact_ms = first_ms + token_ms * count + context_ms * context
        exact_ms += neighbour_ms * is_there
        table.observe(count, float(exact_ms * rng.lognormal(0.0, noise)), context)
        if step % 10 == 0:
            check(table)


def test_prices_that_lost_all_sense_are_dropped_for_the_profile_and_counted():
    table = make_table(has_profile=True, has_context=True)
    for count in (4, 16, 64):
        table.observe(count, 100.0, 1000)
    table._mean[5] = math.nan

    assert table.observe(16, 100.0, 1000) == 1.0

    assert table.num_resets == 1
    profiled = make_table(has_profile=True, has_context=True)
    assert table.export_state() == profiled.export_state()
    table.observe(16, 19.0, 1000)
    check(table)
    assert table.num_resets == 1
