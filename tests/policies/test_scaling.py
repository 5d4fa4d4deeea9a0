"""Scaling: what a replica carries, what load is to come, how many there are to be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.decisions.scaling import LoadForecast, ReplicaPace, Scaling

PACE = ReplicaPace(base_ms=10.0, request_ms=1.0, tokens_per_step=2.0, num_seats=64)


@pytest.mark.parametrize(
    ("target_ms", "tokens_per_step", "capacity"),
    # A token every 15 ms is a step every 30 ms: 20 requests.
    [(15.0, 2.0, 20), (15.0, 1.0, 5), (3.0, 2.0, 2), (1e3, 2.0, 64)],
)
def test_a_replica_carries_what_keeps_steps_short(target_ms, tokens_per_step, capacity):
    pace = ReplicaPace(10.0, 1.0, tokens_per_step, 64)
    assert pace.capacity(target_ms) == capacity


def test_a_rising_load_is_met_one_start_ahead_and_a_falling_one_is_not_trusted():
    rising, falling = LoadForecast(), LoadForecast()
    for second in range(120):
        rising.observe(second, 0.5 * second)
        falling.observe(second, 120.0 - second)
    assert rising.ahead(0.0) == pytest.approx(59.5, abs=3.0)
    assert rising.ahead(60.0) == pytest.approx(89.5, rel=0.1)
    assert falling.ahead(60.0) == pytest.approx(falling.ahead(0.0))


def settle(scaling, load, paces, since_s):
    wanted = len(paces)
    for second in range(since_s, since_s + 200):
        wanted = scaling.decide(second, load, paces, len(paces), wanted)
    return wanted


def test_a_workload_that_accepts_less_needs_more_replicas():
    scaling = Scaling(target_token_ms=15.0, usual_capacity=16.0)
    assert settle(scaling, 40.0, [PACE], 0) == 2
    halved = ReplicaPace(10.0, 1.0, 1.0, 64)
    assert settle(scaling, 40.0, [halved, halved], 1_000) == 8


@pytest.mark.parametrize(("load", "spare"), [(4.0, 2.0), (400.0, 80.0)])
def test_there_are_seats_for_more_than_the_mean_load(load, spare):
    """By the square root, a large fleet needs less to spare; a small one, half."""
    pace = ReplicaPace(10.0, 1.0, 2.0, num_seats=2)
    scaling = Scaling(target_token_ms=1e3, usual_capacity=16.0)
    wanted = settle(scaling, load, [pace, pace], 0)
    assert wanted == math.ceil((load + spare) / 2)


def test_without_any_pace_requests_are_counted():
    scaling = Scaling(target_token_ms=15.0, usual_capacity=16.0)
    assert settle(scaling, 33.0, [], 0) == 3
    assert settle(scaling, 0.0, [], 1_000) == 0


def test_how_long_a_start_takes_is_measured_unless_it_is_called_off():
    scaling = Scaling(target_token_ms=15.0, usual_capacity=1.0)
    before_s = scaling.start_s
    scaling.decide(-600.0, 1.0, [], num_running=1, num_wanted=2)
    scaling.decide(-100.0, 1.0, [], num_running=1, num_wanted=1)
    assert scaling.start_s == before_s
    for now_s in range(0, 360, 60):
        for second in range(20):
            scaling.decide(now_s + second, 1.0, [PACE], num_running=1, num_wanted=2)
        scaling.decide(now_s + 20, 1.0, [PACE, PACE], num_running=2, num_wanted=2)
        scaling.decide(now_s + 30, 1.0, [PACE], num_running=1, num_wanted=1)
    assert scaling.start_s == pytest.approx(20.0, abs=1.5)


@pytest.mark.faults
@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(), st.integers(0, 9)), max_size=40
    )
)
def test_no_clock_and_no_report_breaks_it(looks):
    scaling = Scaling(target_token_ms=15.0, usual_capacity=16.0)
    for now_s, load, count in looks:
        load = min(load, 1e9) if load == load else load
        wanted = scaling.decide(now_s, load, [PACE] * count, count, count)
        assert wanted >= 0
        assert math.isfinite(scaling.start_s)
