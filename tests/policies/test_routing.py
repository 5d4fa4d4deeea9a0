"""Routing: what a request adds to a replica, and which one is chosen."""

import math
import random
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

COSTS_MS = {"base_ms": 10.0, "request_ms": 1.0, "prompt_token_ms": 0.1}
LOAD = ReplicaLoad(**COSTS_MS, tokens_per_step=2.0, num_requests=4)


def choose(loads, seed=0, **options):
    """Choose among replicas; those without a load are full."""
    holder, cached = options.get("holder"), options.pop("cached", 0)

    def describe(index):
        load = loads[index]
        return load and Candidate(load, cached if index == holder else 0)

    given = {"num_prompt_tokens": 100, "num_reply_tokens": 100.0} | options
    return choose_replica(len(loads), describe, random.Random(seed).random, **given)


def test_the_gain_is_that_of_a_simulated_replica():
    """Without a prompt: goodput with the request, less goodput without.

    A prompt takes its time from the neighbours: 100 tokens of 0.1 ms are 10 ms in which
    four others do not put out 5.71 tokens.
    """
    goodput = [1e3 * n * 2.0 / (10.0 + n) for n in (4, 5)]
    gain, _ = goodput_gain(_tabulate([LOAD])[0], 0, 100.0)
    assert gain == pytest.approx(goodput[1] - goodput[0])
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
def test_the_better_of_two_is_chosen(worse):
    for seed in range(8):
        assert choose([worse, LOAD], seed) in [Choice(1, "gain"), Choice(1, "only")]
    assert Choice(1, "gain") in [choose([worse, LOAD], seed) for seed in range(8)]


def test_replicas_that_split_the_same_steps_otherwise_share_the_load():
    """Both take 18 ms with eight requests; one says that all of it is base."""
    shape, counts = CommonShape(), [0, 0]
    splits = [(17.9, 0.0125), (0.5, 2.1875)]
    for request in range(64):
        loads = []
        for (base_ms, request_ms), count in zip(splits, counts, strict=True):
            shape.learn(base_ms, request_ms)
            fitted = shape.fit(base_ms, request_ms, 8)
            loads.append(ReplicaLoad(*fitted, 0.1, 2.0, count))
        choice = choose(loads, seed=request)
        counts[choice.replica] += 1
    assert min(counts) > 24


@pytest.mark.parametrize(
    ("holder", "prompt", "is_chosen"),
    [
        # It wins where the prompt costs more than its load, and loses else.
        (LOAD, 4_000, True),
        (replace(LOAD, num_requests=40, tokens_per_step=1.0), 200, False),
        # One that is far ahead is not asked.
        (replace(LOAD, num_requests=LOAD.num_requests + MAX_AHEAD), 9_000, True),
        (replace(LOAD, num_requests=LOAD.num_requests + MAX_AHEAD + 1), 9_000, False),
    ],
)
def test_the_holder_of_the_prefix_is_looked_at_too(holder, prompt, is_chosen):
    loads = [LOAD] * 39 + [holder]
    given = {"num_prompt_tokens": prompt, "cached": prompt - 40, "holder": 39}
    choice = choose(loads, **given)
    assert (choice == Choice(39, "prefix")) is is_chosen
    assert (choice.replica == 39) is is_chosen


def test_what_is_unknown_is_tried():
    candidates = [Candidate(LOAD), Candidate(None)]
    given = {"num_prompt_tokens": 100, "num_reply_tokens": 100.0}
    choices = {
        choose_replica(2, lambda n: candidates[n], random.Random(seed).random, **given)
        for seed in range(8)
    }
    assert Choice(1, "unknown") in choices


def test_full_replicas_are_passed_over():
    loads = [None] * 1_000
    assert choose(loads, holder=2) is None
    loads[617] = LOAD
    assert choose(loads) == Choice(617, "only")


def test_a_decision_looks_at_three_replicas_however_many_there_are():
    looks = []

    def describe(index):
        looks.append(index)
        return Candidate(LOAD)

    given = {"num_prompt_tokens": 10, "num_reply_tokens": 100.0, "holder": 5}
    for _ in range(100):
        choose_replica(1_000, describe, random.Random(7).random, **given)
    assert len(looks) <= 300


def test_the_longest_known_beginning_is_found():
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
        st.tuples(st.floats(), st.integers(0, 300), st.integers(0, 10_000)), max_size=60
    )
)
@settings(max_examples=60)
def test_no_clock_breaks_the_estimate(steps):
    cost = RequestCost()
    for step_ms, num_requests, num_prompt_tokens in steps:
        cost.observe_step(step_ms, num_requests, num_prompt_tokens)
        cost.observe_tokens(num_requests, num_prompt_tokens)
    assert cost.tokens_per_step >= 1.0
    if cost.costs_ms is not None:
        assert all(math.isfinite(one) and one >= 0.0 for one in cost.costs_ms)


def test_costs_are_learnt_and_a_neighbour_is_noticed_within_thirty_steps():
    cost, rng = RequestCost(), random.Random(0)

    def costs_after(num_steps, speed, *counts):
        for step in range(num_steps):
            requests = counts[step % len(counts)]
            prompt = 50 * (step % 11 == 0)
            true_ms = speed * (8.0 + 0.5 * requests + 0.2 * prompt)
            cost.observe_step(true_ms * rng.gauss(1.0, 0.05), requests, prompt)
            cost.observe_tokens(4, 6)
        return cost.costs_ms

    learnt = costs_after(600, 1.0, 1, 4, 16, 8)
    assert learnt == pytest.approx((8.0, 0.5, 0.2), rel=0.25)
    base, request, _ = costs_after(30, 2.0, 4)
    assert base + 4 * request == pytest.approx(20.0, rel=0.15)
    # How cost grows with load is not forgotten while load stands still.
    base, request, _ = costs_after(5_000, 2.0, 4)
    assert base + 16 * request == pytest.approx(32.0, rel=0.25)
    assert cost.tokens_per_step == pytest.approx(2.5, rel=0.01)
