"""Turns: nothing is lost, time is shared, nobody starves, and turns stay cheap."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.decisions.deadlines import Prediction, predict_finish
from policies.decisions.fairness import OVERDUE_SHARE, FairQueue, Turn, request_cost_ms
from policies.decisions.routing import ReplicaLoad

NEVER_S = 1e9

FLOWS = st.sampled_from("abcd")
COSTS_MS = st.floats(0, 1e5)
WEIGHTS = st.sampled_from([0.001, 0.5, 1.0, 1000.0])
# One is added, removed or gets its turn.
STEPS = st.tuples(st.sampled_from("aaarpp"), FLOWS, COSTS_MS, st.booleans())
WEIGHT_AND_COSTS = st.tuples(
    st.sampled_from([0.5, 1.0, 4.0]), st.lists(st.floats(1, 100))
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=200), st.tuples(WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS))
def test_all_that_waits_gets_its_turn_once_in_its_flows_order(steps, weights):
    """Replays go first, what is removed never comes, and turns stay cheap."""
    weight = dict(zip("abcd", weights, strict=True))
    queue = FairQueue(NEVER_S)
    waiting = {}
    num_visits = 0

    def pop():
        nonlocal num_visits
        before = queue.num_visits
        item = queue.peek(0.0)
        num_visits += queue.num_visits - before
        assert queue.peek(0.0) == item == queue.pop(0.0)
        kind = waiting[item]
        if any(is_replay for is_replay, _ in waiting.values()):
            assert kind[0]
        assert item == min(
            one
            for one, other in waiting.items()
            if other[0] == kind[0] and (kind[0] or other[1] == kind[1])
        )
        del waiting[item]

    for number, (step, flow, cost_ms, is_replay) in enumerate(steps):
        if step == "a":
            turn = Turn(flow, cost_ms, weight[flow])
            queue.add(number, turn, 0.0, first=is_replay)
            waiting[number] = is_replay, flow
        elif step == "r" and waiting:
            gone = next(itertools.islice(waiting, number % len(waiting), None))
            del waiting[gone]
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif step == "p" and waiting:
            pop()
        assert len(queue) == len(waiting)
        assert queue.count() == Counter(name for _, name in waiting.values())
    while waiting:
        pop()
    # Four flows: two visits each in a round, and a round serves about one of each.
    assert num_visits <= 8 * (len(steps) + 4)
    assert not queue.work_ahead_ms(Turn("a", 1.0))


@settings(deadline=None)
@given(st.lists(WEIGHT_AND_COSTS, min_size=2, max_size=4))
def test_flows_that_all_wait_share_time_by_weight(flows):
    queue = FairQueue(NEVER_S)
    for flow, (weight, costs_ms) in enumerate(flows):
        for number, cost_ms in enumerate(costs_ms):
            turn = Turn(str(flow), cost_ms, weight)
            queue.add((flow, number, cost_ms), turn, 0.0, first=False)
    left = [len(costs_ms) for _, costs_ms in flows]
    shares = [0.0] * len(flows)
    while all(left):
        flow, _, cost_ms = queue.pop(0.0)
        left[flow] -= 1
        # A flow is ahead by a quantum and a request at most, over its weight.
        shares[flow] += cost_ms / flows[flow][0]
        assert max(shares) - min(shares) <= 2 * (100 * len(flows) / 0.5 + 100 / 0.5)


def test_what_is_overdue_pays_for_its_turn():
    """Else a flood, once it is old, would have more than its share."""
    queue = FairQueue(30.0)
    for n in range(100):
        queue.add(("flood", n), Turn("flood", 10.0), 0.0, first=False)
    for n in range(100):
        queue.add(("other", n), Turn("other", 10.0), 50.0, first=False)
    turns = Counter(queue.pop(50.0)[0] for _ in range(20 * OVERDUE_SHARE))
    assert abs(turns["flood"] - turns["other"]) <= 2


def test_debts_end_where_nothing_costs_anything():
    """What is overdue leaves debts that a million rounds would not pay."""
    queue = FairQueue(1.0)
    for flow in "ab":
        queue.add(f"{flow} is old", Turn(flow, 1e5), 0.0, first=False)
    for flow in "abc":
        for n in range(4):
            queue.add(f"{flow}{n}", Turn(flow, 0.0), 9.0, first=False)
    order = [queue.pop(9.0) for _ in range(14)]
    assert order.index("a is old") == 0
    assert order.index("b is old") == OVERDUE_SHARE
    assert len(set(order)) == 14
    assert queue.num_visits <= 8 * 14


@pytest.mark.parametrize("turn", [Turn("a", -1.0), Turn("a", 1.0, 0.0)])
def test_a_turn_that_makes_no_sense_is_refused(turn):
    with pytest.raises(ValueError, match="cost must be"):
        FairQueue(NEVER_S).add("one", turn, 0.0, first=False)


BASE_MS, REQUEST_MS, PROMPT_TOKEN_MS = 20.0, 2.0, 0.1


def play(num_requests, num_seats, prompt, reply):
    """Run requests that all come at once through a replica; return when each ends."""
    now_ms, waiting, ends = 0.0, num_requests, []
    # Like those before them, the first ones are anywhere in their replies.
    running = [reply * (seat + 1) // num_seats for seat in range(num_seats)]
    while len(ends) < num_requests + num_seats:
        new = min(waiting, num_seats - len(running))
        waiting -= new
        running += [reply] * new
        now_ms += BASE_MS + REQUEST_MS * len(running) + PROMPT_TOKEN_MS * prompt * new
        ends += [now_ms] * running.count(1)
        running = [left - 1 for left in running if left > 1]
    return ends[num_seats:]


@pytest.mark.parametrize(("num_seats", "reply"), [(1, 50), (4, 100), (16, 40)])
@pytest.mark.parametrize("place", [0, 5, 60])
def test_a_queued_requests_end_is_foreseen(num_seats, reply, place):
    prompt = 30
    # Others come behind it, so that the replica stays full.
    truth_ms = play(place + 2 * num_seats, num_seats, prompt, reply)[place]
    load = ReplicaLoad(BASE_MS, REQUEST_MS, PROMPT_TOKEN_MS, 1.0, num_seats)
    queue = FairQueue(NEVER_S)
    turn = Turn("a", request_cost_ms(load, prompt, reply))
    for n in range(place):
        queue.add(n, turn, 0.0, first=False)
    ahead_ms = queue.work_ahead_ms(turn)
    found = predict_finish(load, 1, ahead_ms, prompt, reply, has_seat=False)
    assert sum(found) == pytest.approx(truth_ms, rel=0.15)


def test_a_wait_has_a_margin_and_the_run_has_none():
    """What it comes to later is in time then, and not a millisecond before."""
    assert Prediction(0.0, 1_000.0).late_ms(1_000.0) == 0.0
    late_ms = Prediction(200.0, 1_000.0).late_ms(1_400.0)
    assert late_ms == pytest.approx(100.0)
    assert Prediction(200.0 - late_ms, 1_000.0).late_ms(1_400.0) == 0.0
