"""A batch that is believed too dear is tried all the same, now and then."""

import numpy as np
import pytest

from policies.decisions.batching import BatchControl, EngineLoad
from policies.estimators.step_cost import StepCost
from policies.types import CostProfile, EngineLimits

MOST = 16
LIMITS = EngineLimits(max_tokens=1024, max_reqs=MOST, skips_drafter=True)


def serve(step_ms, profiled_ms, num_steps, target_ms=None, lengths=(30, 100)):
    """Let as many of many waiting requests run as may; return how many, by step."""
    rng = np.random.default_rng(1)
    cost = StepCost(max_tokens=LIMITS.max_tokens, max_reqs=MOST)
    counts = (1, 2, 4, 8, 16, 32)
    profile = tuple(map(profiled_ms, counts))
    cost.fit_profile(CostProfile(counts, profile, (1.0,) * len(counts)))
    control = BatchControl(cost, LIMITS, target_ms)
    left, sizes = [], []
    for step in range(num_steps):
        num_running = len(left)
        counts = num_running, num_running, 0
        load = EngineLoad(*counts, np.full(num_running, 50), 16, num_waiting=9)
        max_running = control.plan(load, num_steps=step, depth=0).max_running
        left += rng.integers(*lengths, max(0, max_running - num_running)).tolist()
        sizes.append(len(left))
        cost.target.observe(sizes[-1], step_ms(sizes[-1]) * rng.lognormal(0.0, 0.05))
        left = [one - 1 for one in left if one > 1]
    return np.array(sizes)


def even(num_tokens):
    return 30.0 + 1.6 * num_tokens


def dear(num_tokens):
    """Of whom the tokens past eight make steps so dear that fewer are emitted."""
    return even(num_tokens) + 30.0 * max(0, num_tokens - 8)


@pytest.mark.parametrize("lengths", [(30, 100), (8, 24)])
@pytest.mark.parametrize("factor", [1.6, 2.0])
def test_a_pass_that_was_timed_badly_keeps_nobody_out_for_long(factor, lengths):
    """Though requests end so often that some place is free in most steps."""
    profiled = serve(
        even,
        lambda n: even(n) * (factor if n >= MOST else 1.0),
        num_steps=1200,
        lengths=lengths,
    )
    assert profiled[0] < MOST
    assert (profiled[-400:] == MOST).all()


def test_trials_that_show_nothing_new_become_rare():
    sizes = serve(dear, dear, 4000)
    assert sizes.max() > 8
    tokens_per_ms = sizes.sum() / sum(map(dear, sizes))
    assert tokens_per_ms > 0.9 * 8 / dear(8)
    late = sizes[2000:]
    assert late.sum() / sum(map(dear, late)) > 0.95 * 8 / dear(8)


def test_no_trial_breaks_a_latency_target():
    assert serve(even, even, 1200, target_ms=45.0).max() < MOST
