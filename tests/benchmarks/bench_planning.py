"""Processor time of a policy by itself: what an engine step pays for deciding.

Run by name, on one core: `pytest tests/benchmarks/bench_planning.py`. Targets: 100
microseconds for the selection of `tetris` at 256 requests that drafted 8 tokens each,
200 for all that `goodput` does in a step at 64. What the engine's adapter adds is in
`tetris_planning_seconds_total` of a running engine.
"""

import time

import numpy as np
import pytest

from policies.registry import build_planner
from policies.types import EngineLimits, PolicySpec
from tests.policies.made_up_steps import MadeUpStep

DEPTH = 8
LIMITS = EngineLimits(skips_drafter=True, exits_early=True)
POLICIES = {
    "tetris": (PolicySpec("tetris", 4, max_draft_tokens=DEPTH), 256),
    "goodput": (PolicySpec("goodput", max_draft_tokens=DEPTH), 64),
}
ROUNDS, WARM_UP_ROUNDS = 2000, 200

pytestmark = pytest.mark.benchmark(timer=time.thread_time)


@pytest.mark.parametrize("has_classes", [False, True], ids=["alike", "classes"])
@pytest.mark.parametrize("part", ["selection", "whole step"])
@pytest.mark.parametrize("policy", POLICIES)
def test_planning(benchmark, policy, part, has_classes):
    spec, num_reqs = POLICIES[policy]
    planner, rng = build_planner(spec, LIMITS), np.random.default_rng(0)
    steps = []
    timing = None
    num_admitted = np.zeros(0, dtype=np.int64)

    def make_step():
        nonlocal timing, num_admitted
        if steps:
            if part == "selection":  # Then nothing else has been done of the step.
                num_admitted = steps[-1].run(planner, timing)
            timing = steps[-1].time(num_admitted)
        # One request more or less from step to step.
        size = num_reqs - len(steps) % 2
        steps.append(MadeUpStep(rng, size, DEPTH, has_classes=has_classes))

    def run():
        nonlocal num_admitted
        if part == "selection":
            planner.select(steps[-1].batch)
        else:
            num_admitted = steps[-1].run(planner, timing)

    benchmark.pedantic(
        run, setup=make_step, rounds=ROUNDS, warmup_rounds=WARM_UP_ROUNDS
    )
