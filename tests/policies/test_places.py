"""Places, seats and refills: never too many, and some are left for who has few."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.decisions.places import (
    KEPT_SHARE,
    LATELY_S,
    KeptSeats,
    Places,
    count_kept,
)
from policies.decisions.refill import Refills


@given(
    num_flows=st.integers(1, 5),
    limit=st.integers(1, 50),
    asking=st.lists(st.integers(0, 4), max_size=200),
)
def test_places_are_limited_and_some_are_left_for_every_flow(num_flows, limit, asking):
    places = Places(num_flows)
    taken = Counter()
    for number in asking:
        flow = str(number % num_flows)
        if places.has_room(flow, limit):
            places.take(flow)
            taken[flow] += 1
        else:
            assert taken[flow] >= limit // (2 * num_flows)
    assert places.num_taken == taken.total() <= limit
    if num_flows == 1:
        assert places.num_taken == min(limit, len(asking))
    for flow, count in taken.items():
        for _ in range(count):
            places.free(flow)
    assert not places.num_taken


def test_who_came_long_ago_keeps_no_place_and_many_leave_half_for_others():
    places = Places(1)
    for number in range(60):
        places.note_flow(f"key {number}", 0.0)
    num_taken = 0
    while places.has_room("key 0", 100):
        places.take("key 0")
        num_taken += 1
    assert num_taken == 50
    assert places.has_room("key 1", 100)
    # A minute later the others are gone, and all are for who is there.
    places.note_flow("key 0", 2 * LATELY_S)
    assert places.has_room("key 0", num_taken + 1)
    assert not places.has_room("key 0", num_taken)


@given(
    num_seats=st.integers(0, 64),
    weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
    asking=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200),
)
def test_who_hurries_never_has_more_than_its_share(num_seats, weights, asking):
    """All shares together are all seats, so that those who hurry find one in time."""
    seats = KeptSeats()
    held = Counter()
    for number in range(len(weights)):
        seats.note(str(number), weights[number], 0.0)
    for number, comes in asking:
        flow = str(number % len(weights))
        weight = weights[number % len(weights)]
        if comes and seats.has_share_left(flow, num_seats):
            seats.take(flow, weight, 0.0)
            held[flow] += 1
            share = num_seats * weight / sum(weights)
            # Shares are rounded sums of weights.
            assert held[flow] - 1 < share * (1 + 1e-9)
        elif held[flow]:
            seats.free(flow)
            held[flow] -= 1
    assert held.total() < num_seats + len(weights)


def test_seats_are_kept_while_others_have_asked_lately():
    seats = KeptSeats()
    seats.note("flood", 1.0, 0.0)
    assert not seats.is_shared()
    seats.take("quiet", 1.0, 1.0)
    assert seats.is_shared()
    # It may run for long.
    seats.note("flood", 1.0, LATELY_S + 5.0)
    assert seats.is_shared()
    seats.free("quiet")
    seats.note("flood", 1.0, LATELY_S + 10.0)
    assert not seats.is_shared()
    assert seats.has_share_left("flood", 1)
    # One whose request waited so long is no stranger.
    seats.take("quiet", 1.0, LATELY_S + 11.0)
    assert seats.is_shared()


def test_streams_are_computed_anew_as_far_as_there_is_room():
    refills = Refills()
    # One goes whatever is free: else none ever would.
    assert refills.have_room(900, 0)
    refills.note_opened("a", 900)
    assert not refills.have_room(200, 1_000)
    assert refills.have_room(100, 1_000)
    refills.note_begun("a")
    refills.note_begun("a")
    assert refills.have_room(200, 0)


def test_small_engines_keep_none():
    assert [count_kept(n) for n in (1, KEPT_SHARE - 1, KEPT_SHARE, 64)] == [0, 0, 1, 4]
