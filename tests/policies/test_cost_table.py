"""What a table of prices learns, and what no series of timings may do to it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.estimators.cost_table import CostTable
from policies.goodput import GoodputPlanner
from policies.types import CostProfile, DraftBatch, EngineLimits

COUNTS = np.arange(1.0, 513.0)
SIZES = (*range(8, 257, 8),)


def check(table):
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


def make_table(max_count=256, **options):
    return CostTable(max_count, first_ms=20.0, per_unit_ms=0.5, **options)


def make_profiled(*, has_profile, has_context=True):
    table = make_table(has_context=has_context)
    if has_profile:
        table.fit_profile((1, 64, 256), (12.0, 40.0, 130.0))
    return table


@given(
    samples=st.lists(
        st.tuples(st.integers(0, 400), st.floats(), st.integers(0, 10**6)), max_size=60
    ),
    has_profile=st.booleans(),
    has_context=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_timings_in_any_order_break_the_filter(samples, has_profile, has_context):
    table = make_profiled(has_profile=has_profile, has_context=has_context)
    other = CostTable(64, first_ms=2.0, per_unit_ms=0.05)
    smallest = CostTable(1, first_ms=2.0, per_unit_ms=0.05)
    for count, measured_ms, num_context_tokens in samples:
        is_possible = count > 0 and 0.0 < measured_ms < math.inf
        before = None if is_possible else table.export_state()
        factor = table.observe(count, measured_ms, num_context_tokens)
        assert is_possible or (factor, table.export_state()) == (1.0, before)
        other.rescale(factor)
        smallest.observe(count, measured_ms)
        check(table)
    check(other)
    check(smallest)


# Each once made context cheaper than nothing; about one seed in 60 did.
@pytest.mark.parametrize("seed", [98, 185, 289, 290, 292, 312])
def test_a_neighbour_that_comes_and_goes_leaves_prices_that_make_sense(seed):
    rng = np.random.default_rng(seed)
    table = make_profiled(has_profile=bool(rng.random() < 0.6))
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
    table = make_profiled(has_profile=True)
    for count in (4, 16, 64):
        table.observe(count, 100.0, 1000)
    table._mean[5] = math.nan

    assert table.observe(16, 100.0, 1000) == 1.0

    assert table.num_resets == 1
    assert table.export_state() == make_profiled(has_profile=True).export_state()
    table.observe(16, 19.0, 1000)
    check(table)
    assert table.num_resets == 1


def test_one_outlier_moves_a_settled_table_little():
    table = make_table(64)
    for _ in range(200):
        table.observe(8, 20.0)
    table.observe(8, 2000.0)
    assert float(table.predict(8.0)) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(
    ("factor", "constant_ms"), [(1.0, 380.0), (8.0, 0.0)], ids=["constant", "multiple"]
)
def test_what_a_token_costs_beside_a_neighbour_is_learnt(factor, constant_ms):
    """A lost core delays every pass or slows every token; 50 steps tell which.

    The one taken for the other would be seven times off.
    """
    rng = np.random.default_rng(5)
    table = make_table()
    table.fit_profile([1, 64, 256], [40.0, 120.0, 360.0])

    def run(count):
        return float(np.interp(count, [1, 64, 256], [40.0, 120.0, 360.0]))

    def observe(num_steps, factor=1.0, constant_ms=0.0):
        for _ in range(num_steps):
            count = int(rng.integers(4, 33))
            price = factor * run(count) + constant_ms
            table.observe(count, price * rng.lognormal(0.0, 0.05))

    observe(350)
    observe(50, factor, constant_ms)
    ratio = (table.at(60) - table.at(4)) / (factor * (run(60) - run(4)))
    assert 0.4 < ratio < 2.5
    assert table.at(18) == pytest.approx(factor * run(18) + constant_ms, rel=0.1)
    observe(20)
    for count in (4, 18, 60):
        assert table.at(count) == pytest.approx(run(count), rel=0.1)


@pytest.mark.parametrize("padded_sizes", [(), (8, 16)])
def test_one_look_up_a_range_and_many_agree(padded_sizes):
    table = CostTable(64, first_ms=1.0, per_unit_ms=1.0, padded_sizes=padded_sizes)
    counts = np.array([-1.0, 0.0, 1.0, 8.0, 8.5, 16.0, 16.5, 40.0, 100.0])
    # Nothing costs nothing, and counts past the largest size are not padded.
    expected = [0.0, 0.0, 8.0, 8.0, 16.0, 16.0, 16.5, 40.0, 100.0]
    if not padded_sizes:
        expected = counts.clip(0.0)
    assert table.predict(counts) == pytest.approx(expected)
    assert [table.at(count) for count in counts.tolist()] == pytest.approx(expected)
    assert table.predict(counts.reshape(1, -1)).shape == (1, counts.size)

    for count in np.random.default_rng(4).integers(1, 65, 40).tolist():
        table.observe(count, 10.0 + 0.3 * count)
    prices = np.ones(30)
    table.add_range(prices, 5)
    assert prices == pytest.approx(1.0 + table.predict(np.arange(5.0, 35.0)))


def test_a_profile_is_kept_as_it_was_measured_at_every_size():
    table = CostTable(300, first_ms=1.0, per_unit_ms=1.0, padded_sizes=SIZES)
    measured_ms = tuple(10.0 + (size // 64) * 7.0 for size in SIZES)
    table.fit_profile(SIZES, measured_ms)
    assert table.predict(np.array(SIZES, dtype=float)) == pytest.approx(measured_ms)
    assert table.at(57) == pytest.approx(measured_ms[SIZES.index(64)])
    assert table.export_state()["knots"] == [*SIZES, 300]


def test_drafts_fill_a_stair_and_do_not_begin_one():
    limits = EngineLimits(max_tokens=512, max_reqs=64, padded_sizes=SIZES)
    planner = GoodputPlanner.build(1, limits)
    target_ms = tuple(10.0 + 0.5 * size for size in SIZES)
    planner.fit_profile(CostProfile(SIZES, target_ms, (0.5,) * len(SIZES)))
    num_reqs, rng = 61, np.random.default_rng(2)
    for _ in range(50):
        planner.choose_depth(num_reqs)
        confidence = rng.uniform(0.02, 0.9, (num_reqs, 1))
        one_each = np.ones(num_reqs, dtype=np.int64)
        batch = DraftBatch(one_each, confidence, num_decodes=num_reqs)
        selection = planner.select(batch)
        num_tokens = num_reqs + int(selection.num_admitted.sum())
        assert num_tokens in SIZES or selection.is_probe
    # Tokens are padded, counts of requests are not.
    cost = planner.cost
    assert cost.target.at(57) == cost.target.at(64) < cost.target.at(65)
    assert cost.host.at(57) < cost.host.at(64)
