"""What learning prices from a clock that errs costs `goodput`, in throughput.

The README quotes what is below: at most .3 % on a quiet clock, 1 to 3.5 % on one that
wanders, whatever a start-up profile says.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.policies.made_up import MadeUpEngine, make_goodput

SEEDS = range(12)


def wander(jitter, step, seed):
    """Yield factors that err by a part of their own and by one that lasts.

    The logarithm of the second moves by `step` and forgets a hundredth in each.
    """
    rng, lasting = np.random.default_rng(seed), 0.0
    while True:
        lasting = 0.99 * lasting + rng.normal(0.0, step)
        yield float(np.exp(lasting + rng.normal(0.0, jitter)))


def throughput(num_reqs, clock=None, slope=1.0):
    """Run `goodput` by a clock, after a profile whose price of a token is off."""
    engine, planner = MadeUpEngine(num_reqs, clock=clock), make_goodput()
    profile, base_ms = engine.profile(), engine.base_ms
    target_ms = tuple(base_ms + slope * (ms - base_ms) for ms in profile.target_ms)
    planner.fit_profile(replace(profile, target_ms=target_ms))
    engine.run(planner, 100)
    return engine.run(planner, 300)


@pytest.mark.faults
@pytest.mark.parametrize("num_reqs", [4, 8, 16])
@pytest.mark.parametrize(
    ("jitter", "step", "slope", "most"),
    [(0.03, 0.0, 1.0, 0.005), (0.1, 0.05, 1.0, 0.04), (0.1, 0.05, 0.5, 0.04)],
    ids=["quiet", "wandering", "wandering, wrong profile"],
)
def test_a_noisy_clock_costs_little(num_reqs, jitter, step, slope, most):
    exact = throughput(num_reqs)
    clocks = [wander(jitter, step, seed) for seed in SEEDS]
    learnt = np.mean([throughput(num_reqs, clock, slope) for clock in clocks])
    assert learnt > (1 - most) * exact
