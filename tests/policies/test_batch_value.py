"""How many requests run where classes have latency targets of their own."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from policies.audit.audited import AuditedPlanner
from policies.audit.schedule import AuditSchedule
from policies.decisions.batch_value import ClassLoad
from policies.decisions.batching import (
    MIN_PREFILL_TOKENS,
    BatchControl,
    EngineLoad,
)
from policies.estimators.step_cost import StepCost
from policies.types import CostProfile, EngineLimits, VerificationOutcome
from tests.policies import made_up
from tests.policies.made_up import MadeUpEngine, make_goodput

TOKENS = np.array([1.0, 1.8, 2.4])
LIMITS = EngineLimits(max_tokens=1024, max_reqs=64, skips_drafter=True)


@pytest.fixture
def cost():
    """A step of 11 ms, and one more for each token; the drafter takes no time."""
    cost = StepCost(max_tokens=1024, max_reqs=64)
    counts = (1, 64, 1024)
    cost.fit_profile(CostProfile(counts, tuple(10.0 + n for n in counts), (0.0,) * 3))
    cost.draft_next.fit_profile((1, 64), (0.0, 0.0))
    cost.host.fit_profile((1, 64), (1.0, 1.0))
    return cost


def count_running(cost, *classes, **limits):
    load = EngineLoad(16, 16, 0, np.full(16, 8), 16, classes=classes)
    control = BatchControl(cost, LIMITS, **limits)
    plan = control.plan(load, num_steps=0, depth=0, tokens_by_depth=lambda: TOKENS)
    return plan.max_running


def test_as_many_run_as_keep_the_target_of_those_who_are_worth_most(cost):
    tight, loose = ClassLoad(30.0, 4.0, 8), ClassLoad(np.inf, 0.5, 8)
    # With two drafts for half of them, 11 + 2 n ms are within 2.4 times 30.
    assert count_running(cost, tight, loose) == 30
    # Both alike: the tight ones, and with them the loose ones too.
    assert count_running(cost, tight, loose._replace(target_ms=80.0)) == 30
    # A limit for all steps counts besides.
    assert count_running(cost, tight, loose, latency_target_ms=21.0) == 10


@pytest.mark.parametrize(
    "classes",
    [
        [ClassLoad(np.inf, 0.5, 8)],
        # Worth less, or too few, for what the others would lose: 30 of them emit half
        # of what 64 do.
        [ClassLoad(30.0, 0.01, 8), ClassLoad(np.inf, 0.5, 8)],
        # Not even one alone gets its tokens in time, nor of any class.
        [ClassLoad(2.0, 4.0, 8), ClassLoad(np.inf, 0.5, 8)],
        [ClassLoad(2.0, 4.0, 8), ClassLoad(3.0, 0.5, 8)],
    ],
)
def test_a_target_that_does_not_pay_empties_nothing(cost, classes):
    assert count_running(cost, *classes) == 64


def test_prompts_that_steps_carry_take_their_part(cost):
    tight, loose = ClassLoad(30.0, 4.0, 8), ClassLoad(np.inf, 0.5, 8)
    # One prompt token with each of the 16 that run: 11 + 3 n ms.
    cost.prompts.mean_tokens = 16.0
    assert count_running(cost, tight, loose) == 20


# While an audit holds speculation back.

LOAD = EngineLoad(16, 16, 1600, np.full(16, 8), 16)
NOTHING = VerificationOutcome(np.empty(0, np.int64), np.empty(0, np.int64))


def hold_back(planner):
    """Return it audited, and held at depth 0 for 16 requests."""
    audited = AuditedPlanner(planner, AuditSchedule(0.015, np.random.default_rng(0)))
    audited.holding.at(16).hold_steps = 10_000
    assert audited.choose_depth(16) == 0
    return audited


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_how_many_run_follows_the_step_time_while_speculation_is_held_back(speed):
    """The planner is not asked for a depth then, only what to run."""
    planner, engine = make_goodput(latency_target_ms=40.0), MadeUpEngine(16)
    engine.run(planner, 200)
    audited = hold_back(planner)
    before = audited.plan_batch(LOAD).max_running
    engine.speed = speed
    for _ in range(64):
        audited.observe(NOTHING)
        audited.observe_timing(engine.time(0, 0))
        after = audited.plan_batch(LOAD).max_running
        assert audited.choose_depth(16) == 0
    # Steps of 14 ms and .85 for each request, or half or twice as much, within 40.
    assert before == pytest.approx(30, abs=2)
    assert after > 1.5 * before if speed < 1 else after < before / 1.5


def test_drafts_that_are_held_back_are_neither_charged_nor_counted_on():
    planner, engine = make_goodput(latency_target_ms=50.0), MadeUpEngine(16)
    engine.run(planner, 300)
    classes = ClassLoad(30.0, 4.0, 8), ClassLoad(np.inf, 0.5, 8)
    load = replace(LOAD, classes=classes)
    drafting = copy.deepcopy(planner).plan_batch(load)
    held = hold_back(planner).plan_batch(load)
    # As no drafter's pass runs over the prompts.
    assert held.max_prefill_tokens > drafting.max_prefill_tokens
    # Without drafts 18 are within 30 ms: 14 ms, and .85 for each.
    assert held.max_running == pytest.approx(18, abs=1)
    assert held.max_running < drafting.max_running


def test_prompts_are_bound_by_a_target_that_only_drafts_keep():
    planner, engine = make_goodput(), MadeUpEngine(16)
    engine.run(planner, 300)
    # A step takes 28 ms at least, and brings whoever has all drafts 1.5 tokens.
    load = replace(LOAD, latency_target_ms=26.5)
    assert planner.plan_batch(load).max_prefill_tokens == MIN_PREFILL_TOKENS
    # Without drafts it is missed whatever prompts do.
    held = hold_back(planner).plan_batch(load)
    assert held.max_prefill_tokens == made_up.LIMITS.max_tokens
