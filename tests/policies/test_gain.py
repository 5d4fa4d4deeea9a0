"""The gain by what blocks have told: how sure it is, and how long it is believed."""

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.audit.block import BlockResult, SeenStep
from policies.audit.gain import MIN_BLOCKS, estimate_gain
from policies.audit.holding import Trial
from policies.audit.ledger import Ledger, LoadSums, bucket_of

NUM_REQS = 4
NUM_SIMULATIONS = 800
TRUE_RATIO = 1.4
TOKENS = 2.0


def simulate(rng, num_simulations=1, num_blocks=120):
    """Blocks of three steps in a series that wanders and drifts, and their neighbours.

    Times of a step are lognormal, with an autoregression of .9 from step to step,
    another of .6 from block to block that meets a block but not its neighbours, and a
    drift by which the engine gets slower by a half.
    """
    shape = num_simulations, num_blocks
    value, between = 0.2 * rng.normal(size=shape), np.zeros(num_simulations)
    steps = np.zeros((35, *shape))
    for step in range(35):
        value = 0.9 * value + 0.087 * rng.normal(size=shape)
        steps[step] = value
    level = np.exp(0.4 * np.arange(num_blocks) / num_blocks)
    times = level * np.exp(steps)
    around = 0.5 * (times[:16].mean(axis=0) + times[19:].mean(axis=0))
    own = TRUE_RATIO / TOKENS * times[16:19].sum(axis=0)
    for number in range(num_blocks):
        between = 0.6 * between + 0.05 * rng.normal(size=num_simulations)
        own[:, number] *= np.exp(between)

    def describe(at_s, ms, near_ms):
        return BlockResult(at_s, "none", NUM_REQS, 3, ms, 3.0, 0, near_ms, 0.0)

    return [
        [describe(at_s, *block) for at_s, block in enumerate(zip(*one, strict=True))]
        for one in zip(own.tolist(), around.tolist(), strict=True)
    ]


def make_loads(num_loads=1):
    """A thousand steps that decode alone, at each of so many loads."""
    return {
        NUM_REQS + n: LoadSums(num=1e3, ms=1e3, tokens=TOKENS * 1e3, target_ms=1e3)
        for n in range(num_loads)
    }


def naive_interval(blocks):
    """The control: every measured step is taken for one drawn by itself."""
    ratios = np.repeat([b.ms / b.num_steps / b.near_target_ms for b in blocks], 3)
    half = 1.96 * ratios.std() / math.sqrt(ratios.size)
    return TOKENS * (ratios.mean() - half), TOKENS * (ratios.mean() + half)


@pytest.mark.parametrize(
    ("num_blocks", "num_loads", "least"),
    [(MIN_BLOCKS, 1, 0.92), (100, 1, 0.92), (MIN_BLOCKS, 4, 0.9), (24, 4, 0.9)],
)
def test_95_of_100_intervals_hold_the_gain_and_naive_ones_do_not(
    num_blocks, num_loads, least
):
    """Of 800 simulations, so that chance moves the share by .8 % either way.

    Blocks fall on loads by chance; where too many loads have one or none, nothing is
    told.
    """
    rng = np.random.default_rng(num_blocks)
    loads = make_loads(num_loads)
    simulated = [
        [one._replace(num_reqs=NUM_REQS + int(rng.integers(num_loads))) for one in all_]
        for all_ in simulate(rng, NUM_SIMULATIONS, num_blocks)
    ]
    every = [block for blocks in simulated for block in blocks]
    # The expectation of what was simulated: the same ratio of sums, of all of them.
    near_ms = sum(3.0 * one.near_target_ms for one in every)
    truth = sum(one.ms for one in every) / near_ms
    held = naive = told = 0
    for blocks in simulated:
        gain = estimate_gain(loads, blocks)
        if gain is None:
            continue
        told += 1
        held += gain.lower <= TOKENS * truth <= gain.upper
        lower, upper = naive_interval(blocks)
        naive += lower <= TOKENS * truth <= upper
    assert told > NUM_SIMULATIONS / 2
    assert least <= held / told <= 0.98
    assert naive / told < 0.85


def test_too_few_blocks_or_loads_without_any_tell_nothing():
    (blocks,), loads = simulate(np.random.default_rng(0)), make_loads()
    assert estimate_gain(loads, blocks[: MIN_BLOCKS - 1]) is None
    elsewhere = {1: LoadSums(num=500.0, ms=500.0, tokens=900.0, target_ms=500.0)}
    assert estimate_gain(loads | elsewhere, blocks) is None


def test_steps_that_rest_count_as_no_speculation():
    (blocks,), loads = simulate(np.random.default_rng(0)), make_loads()
    working = estimate_gain(loads, blocks)
    loads[NUM_REQS].rest_ms = 3000.0
    resting = estimate_gain(loads, blocks)
    # A quarter of the time is spent as before.
    assert resting.ratio == pytest.approx(0.75 + 0.25 * working.ratio)


def test_a_ledger_forgets_what_is_older_than_an_hour_of_work():
    ledger = Ledger()
    for step in range(1000):
        ledger.add_policy(SeenStep(NUM_REQS, 10_000.0, 2.0, 0, 9_000.0, 4), 100.0)
        if step % 10 == 0:
            (block,) = simulate(np.random.default_rng(step), 1, 1)[0]
            ledger.blocks.append(block._replace(at_s=ledger.now_s))
    # Ten seconds each; a minute or so more or less.
    sums = ledger.total()[NUM_REQS]
    assert 350 <= sums.num <= 375
    assert sums.ms == pytest.approx(10_000.0 * sums.num)
    assert 35 <= len(ledger.blocks) <= 38


def test_a_long_window_decides_where_the_short_one_has_no_block_of_some_load():
    trial = Trial()
    for number in range(300):
        # Half of the time at each of two loads; of one there are blocks at first only.
        num_steps = 10.0 * (number + 1)
        sums = LoadSums(num_steps, 10 * num_steps, TOKENS * num_steps)
        sums.target_ms = 10 * num_steps
        loads = {bucket_of(n): replace(sums) for n in (16, 24)}
        is_early = number < 24
        ms = 30.0 * ((0.4, 0.8)[number % 2] if is_early else 0.02)
        num_reqs = 24 if number < 10 and number % 3 else 16
        block = BlockResult(number, "none", num_reqs, 3, ms, 3.0, 0, 10.0, 0.0)
        trial.note_block(block, loads, loses_elsewhere=False)
        assert not (is_early and trial.hold_steps)
        if trial.hold_steps:
            break
    assert trial.hold_steps >= 1024
