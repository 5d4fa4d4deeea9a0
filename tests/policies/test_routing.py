"""Routing: what a request adds to a replica, and which one is chosen."""

import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.decisions.prefix_holders import PrefixHolders
from policies.decisions.routing import (
    MAX_AHEAD,
    Candidate,
    Choice,
    CommonShape,
    ReplicaLoad,
    _tabulate,
    choose_replica,
    goodput_gain,
)
from policies.estimators.request_cost import RequestCost

LOAD = ReplicaLoad(
    base_ms=10.0,
    request_ms=1.0,
    prompt_token_ms=0.1,
    tokens_per_step=2.0,
    num_requests=4,
)


def choose(
    loads: list[ReplicaLoad | None], seed: int = 0, **options: int
) -> Choice | None:
    """Choose among replicas of which all can take a request."""
    cached = options.pop("cached", 0)
    holder = options.get("holder")
    return choose_replica(
        len(loads),
        lambda index: Candidate(loads[index], cached if index == holder else 0),
        random.Random(seed).random,
        **{"num_prompt_tokens": 100, "num_reply_tokens": 100.0} | options,
    )


def test_the_gain_is_that_of_a_simulated_replica() -> None:
    """A request without a prompt: goodput with it, less goodput without."""
    gain, _ = goodput_gain(_tabulate([LOAD])[0], 0, 100.0)
    goodput = [1e3 * n * 2.0 / (10.0 + n) for n in (4, 5)]
    assert gain == pytest.approx(goodput[1] - goodput[0])


def test_a_prompt_takes_its_time_from_the_neighbours() -> None:
    """100 tokens of 0.1 ms: 10 ms in which four others do not put out 5.71 tokens."""
    reply_ms = 100 / 2 * 15.0
    others_lost = 8 * ((10.0 + reply_ms) / 14.0 - reply_ms / 15.0)
    expected = 1e3 * (100 - others_lost) / (10.0 + reply_ms)
    gain, _ = goodput_gain(_tabulate([LOAD])[0], 100, 100.0)
    assert gain == pytest.approx(expected)


@pytest.mark.parametrize(
    "worse",
    [
        replace(LOAD, num_requests=9),
        replace(LOAD, tokens_per_step=1.2),
        replace(LOAD, request_ms=3.0),
        replace(LOAD, num_prompt_tokens=5_000),
        # A neighbour on its cores: everything takes longer.
        replace(LOAD, base_ms=15.0, request_ms=1.5, prompt_token_ms=0.15),
    ],
)
def test_the_better_of_two_is_chosen(worse: ReplicaLoad) -> None:
    for seed in range(8):
        assert choose([worse, LOAD], seed) in [Choice(1, "gain"), Choice(1, "only")]
    assert Choice(1, "gain") in [choose([worse, LOAD], seed) for seed in range(8)]


def test_replicas_that_split_the_same_steps_otherwise_share_the_load() -> None:
    """Both take 18 ms with eight requests; one says that all of it is base."""
    shape, counts = CommonShape(), [0, 0]
    splits = [(17.9, 0.0125), (0.5, 2.1875)]
    for request in range(64):
        loads = []
        for (base_ms, request_ms), count in zip(splits, counts, strict=True):
            shape.learn(base_ms, request_ms)
            fitted = shape.fit(base_ms, request_ms, 8)
            loads.append(ReplicaLoad(*fitted, 0.1, 2.0, count))
        choice = choose(list(loads), seed=request)
        assert choice is not None
        counts[choice.replica] += 1
    assert min(counts) > 24


def test_a_slower_replica_is_slower_in_any_shape() -> None:
    base_ms, request_ms = CommonShape().fit(16.0, 2.0, 8)
    assert base_ms + 8 * request_ms == pytest.approx(32.0)


def test_the_holder_of_the_prefix_is_looked_at_too() -> None:
    """It wins where the prompt costs more than its load, and loses else."""
    loads: list[ReplicaLoad | None] = [LOAD] * 40
    long = {"num_prompt_tokens": 4_000, "cached": 3_968, "holder": 39}
    assert choose(loads, **long) == Choice(39, "prefix")
    loads[39] = replace(LOAD, num_requests=40, tokens_per_step=1.0)
    short = {"num_prompt_tokens": 200, "cached": 128, "holder": 39}
    choice = choose(loads, **short)
    assert choice is not None
    assert choice.replica != 39


def test_a_holder_that_is_far_ahead_is_not_asked() -> None:
    loads: list[ReplicaLoad | None] = [LOAD] * 40
    loads[39] = replace(LOAD, num_requests=LOAD.num_requests + MAX_AHEAD)
    long = {"num_prompt_tokens": 9_000, "cached": 8_960, "holder": 39}
    assert choose(loads, **long) == Choice(39, "prefix")
    loads[39] = replace(LOAD, num_requests=LOAD.num_requests + MAX_AHEAD + 1)
    choice = choose(loads, **long)
    assert choice is not None
    assert choice.replica != 39


def test_what_is_unknown_is_tried() -> None:
    choices = {choose([LOAD, None], seed) for seed in range(8)}
    assert Choice(1, "unknown") in choices


def test_full_replicas_are_passed_over() -> None:
    free = {617}
    choice = choose_replica(
        1_000,
        lambda index: Candidate(LOAD) if index in free else None,
        random.Random(1).random,
        num_prompt_tokens=10,
        num_reply_tokens=100.0,
    )
    assert choice == Choice(617, "only")
    free.clear()
    assert (
        choose_replica(
            3,
            lambda _: None,
            random.Random(1).random,
            num_prompt_tokens=10,
            num_reply_tokens=100.0,
            holder=2,
        )
        is None
    )


def test_a_decision_looks_at_three_replicas_however_many_there_are() -> None:
    looks = []

    def describe(index: int) -> Candidate:
        looks.append(index)
        return Candidate(LOAD)

    for _ in range(100):
        choose_replica(
            1_000,
            describe,
            random.Random(7).random,
            num_prompt_tokens=10,
            num_reply_tokens=100.0,
            holder=5,
        )
    assert len(looks) <= 300


def test_the_longest_known_beginning_is_found() -> None:
    holders = PrefixHolders(block_tokens=4, max_blocks=3, capacity=6)
    holders.note(range(10), "a")
    assert holders.find(range(10)) == ("a", 8)
    assert holders.find([*range(4), 9, 9, 9, 9]) == ("a", 4)
    assert holders.find([9, *range(9)]) is None
    holders.note(range(40), "b")
    assert holders.find(range(40)) == ("b", 12)
    # Six blocks are remembered: the oldest prompt loses its end.
    holders.note(range(100, 112), "c")
    holders.note(range(200, 204), "d")
    assert holders.find(range(40)) == ("b", 8)
    assert holders.find(range(100, 112)) == ("c", 12)


@pytest.mark.faults
@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True),
            st.integers(0, 300),
            st.integers(0, 10_000),
        ),
        max_size=60,
    )
)
@settings(max_examples=60)
def test_no_clock_breaks_the_estimate(steps: list[tuple[float, int, int]]) -> None:
    cost = RequestCost()
    for step_ms, num_requests, num_prompt_tokens in steps:
        cost.observe_step(step_ms, num_requests, num_prompt_tokens)
        cost.observe_tokens(num_requests, num_prompt_tokens)
    assert cost.tokens_per_step >= 1.0
    if cost.costs_ms is not None:
        assert all(math.isfinite(one) and one >= 0.0 for one in cost.costs_ms)


def teach(
    cost: RequestCost, num_steps: int, speed: float, counts: tuple[int, ...]
) -> None:
    rng = random.Random(num_steps)
    for step in range(num_steps):
        requests = counts[step % len(counts)]
        prompt = 50 * (step % 11 == 0)
        true_ms = speed * (8.0 + 0.5 * requests + 0.2 * prompt)
        cost.observe_step(true_ms * rng.gauss(1.0, 0.05), requests, prompt)


def test_costs_are_learnt_and_a_neighbour_is_noticed_within_thirty_steps() -> None:
    cost = RequestCost()
    teach(cost, 600, 1.0, (1, 4, 16, 8))
    assert cost.costs_ms == pytest.approx((8.0, 0.5, 0.2), rel=0.25)
    teach(cost, 30, 2.0, (4,))
    assert cost.costs_ms is not None
    base, request, _ = cost.costs_ms
    assert base + 4 * request == pytest.approx(20.0, rel=0.15)
    # How cost grows with load is not forgotten while load stands still.
    teach(cost, 5_000, 2.0, (4,))
    base, request, _ = cost.costs_ms
    assert base + 16 * request == pytest.approx(32.0, rel=0.25)


def test_acceptance_is_part_of_a_replica_s_pace() -> None:
    cost = RequestCost()
    for _ in range(400):
        cost.observe_tokens(4, 6)
    assert cost.tokens_per_step == pytest.approx(2.5, rel=0.01)


def test_a_decision_takes_less_than_a_tenth_of_a_millisecond() -> None:
    """By an order of magnitude, so that no busy machine fails it."""
    holders = PrefixHolders()
    prompt = list(range(1_000))
    holders.note(prompt, "a")
    rng = random.Random(3)
    best_s = math.inf
    for _ in range(50):
        began_s = time.perf_counter()
        holders.find(prompt)
        choose_replica(
            1_000,
            lambda _: Candidate(LOAD),
            rng.random,
            num_prompt_tokens=1_000,
            num_reply_tokens=100.0,
            holder=4,
        )
        best_s = min(best_s, time.perf_counter() - began_s)
    assert best_s < 1e-3
