"""Steps that are not the best guess: how often, at what price, and what they teach."""

from __future__ import annotations

import numpy as np
import pytest

from policies.baselines import DynamicPlanner
from policies.depth_control import REPLAN_EVERY
from policies.exploration import (
    EXPLORE_EVERY,
    MAX_BACKLOG_INTERVAL,
    MAX_EXPLORE_INTERVAL,
    TIME_PASS_EVERY,
    Exploration,
)
from policies.goodput import GoodputPlanner
from policies.planner import Planner
from policies.types import EngineLimits, VerificationOutcome
from tests.policies.made_up import (
    LIMITS,
    MAX_DEPTH,
    MadeUpEngine,
    make_goodput,
    outcome_of,
)

NOTHING = VerificationOutcome(np.array([]), np.array([]))


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again_now_and_then():
    planner = make_goodput()
    engine = MadeUpEngine(48, token_ms=5.0)
    engine.run(planner, 200)
    depths = []
    for _ in range(2 * MAX_EXPLORE_INTERVAL):
        depths.append(planner.choose_depth(48))
        planner.observe_timing(engine.fill_backlog(engine.time(0, depths[-1])))
        planner.observe(NOTHING)
    num_tries = np.count_nonzero(depths)
    assert 2 <= num_tries <= 2 * MAX_EXPLORE_INTERVAL / EXPLORE_EVERY


@pytest.mark.parametrize("name", ["goodput", "dynamic"])
def test_steps_that_nobody_asked_about_count_towards_the_next_try(name: str):
    planner: Planner = (
        make_goodput() if name == "goodput" else DynamicPlanner(MAX_DEPTH, LIMITS)
    )
    engine = MadeUpEngine(48, token_ms=5.0)
    planner.fit_profile(engine.profile())
    engine.run(planner, 200)
    while planner.choose_depth(48) == 0:
        pass
    # It has just been tried.
    assert planner.choose_depth(48) == 0
    planner.note_skipped_steps(MAX_BACKLOG_INTERVAL + MAX_EXPLORE_INTERVAL)
    assert planner.choose_depth(48) > 0


def test_skipped_steps_count_as_planned_ones_do():
    by_step, at_once = Exploration(), Exploration()
    for _ in range(EXPLORE_EVERY - 8):
        assert by_step.adjust_depth(0, MAX_DEPTH) == 0
    at_once.note_skipped_steps(EXPLORE_EVERY - 8)
    for _ in range(7):
        assert by_step.adjust_depth(0, MAX_DEPTH) == 0
        assert at_once.adjust_depth(0, MAX_DEPTH) == 0
    assert by_step.adjust_depth(0, MAX_DEPTH) == at_once.adjust_depth(0, MAX_DEPTH) > 0


class DearDrafter:
    """48 requests where drafting does not pay, and catching up takes seconds.

    Every request holds 100 positions, each half a millisecond of the drafter's time.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.engine = MadeUpEngine(48, token_ms=5.0, draft_token_ms=0.5)
        planner.fit_profile(self.engine.profile())
        self.plain_ms = self.engine.time(0, 0).total_ms

    def run(self, num_steps: int) -> list[float]:
        """Return the time of each step."""
        steps_ms = []
        for _ in range(num_steps):
            depth = self.planner.choose_depth(48)
            timing = self.engine.fill_backlog(self.engine.time(0, depth))
            self.planner.observe_timing(timing)
            self.planner.observe(NOTHING)
            steps_ms.append(timing.total_ms + timing.backlog_ms)
        return steps_ms


@pytest.mark.parametrize("name", ["goodput", "dynamic"])
def test_catching_up_to_explore_takes_a_small_share_of_the_time(name: str):
    planner: Planner = (
        make_goodput() if name == "goodput" else DynamicPlanner(MAX_DEPTH, LIMITS)
    )
    drafter = DearDrafter(planner)
    drafter.run(8 * MAX_EXPLORE_INTERVAL)  # Learning.
    steps_ms = np.array(drafter.run(16 * MAX_EXPLORE_INTERVAL))
    assert (steps_ms > drafter.plain_ms).any()
    assert steps_ms.sum() < 1.01 * drafter.plain_ms * steps_ms.size


def test_exploring_does_not_break_a_latency_target_that_is_met_without():
    planner = make_goodput(latency_target_ms=350.0)
    drafter = DearDrafter(planner)
    drafter.run(2 * MAX_EXPLORE_INTERVAL)  # Learning.
    assert max(drafter.run(8 * MAX_EXPLORE_INTERVAL)) <= 350.0


def test_a_pass_that_was_not_timed_for_long_is_tried_again():
    """A second pass believed too dear is never run, and its price never corrected."""
    limits = EngineLimits(
        max_tokens=512, max_reqs=64, skips_drafter=True, exits_early=True
    )
    planner = GoodputPlanner.build(MAX_DEPTH, limits)
    engine = MadeUpEngine(1)
    # Of its last passes all but one are learnt.
    engine.run(planner, 97)
    planner.cost.draft_next.fit_profile((1, 64), (1000.0, 1000.0))
    timing = engine.time(num_verified=1, depth=1)
    stops = []
    for _ in range(3 * TIME_PASS_EVERY):
        planner.choose_depth(1)
        stops.append(planner.early_exit(("0",)))
        planner.observe(outcome_of("0", 0.9, 1))
        planner.observe_timing(timing)
    assert stops[2 * REPLAN_EVERY].pass_price > 1.0
    # One pass more, in one step, and again after as long.
    free = [stop for stop in stops if stop is not None and stop.pass_price == 0.0]
    assert len(free) == 2
    assert {stop.max_depth for stop in free} == {2}


def test_an_engine_that_cannot_end_a_draft_times_a_second_pass_now_and_then():
    planner = make_goodput()
    engine = MadeUpEngine(1)
    engine.run(planner, 100)
    planner.cost.draft_next.fit_profile((1, 64), (1000.0, 1000.0))
    depths = []
    for _ in range(3 * TIME_PASS_EVERY):
        depths.append(planner.choose_depth(1))
        planner.observe(outcome_of("0", 0.9, 1))
        planner.observe_timing(engine.time(num_verified=1, depth=1))
    settled = depths[2 * REPLAN_EVERY :]
    assert set(settled) == {1, 2}
    assert settled.count(2) in (2, 3)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_believed_hopeless_are_verified_now_and_then(sampled: bool):
    engine = MadeUpEngine(4, token_ms=0.2)
    planner = make_goodput()
    engine.run(planner, 200, sampled=sampled)
    for _ in range(16):
        planner.acceptance.calibration._intercept[:] = -5.0
        engine.run(planner, REPLAN_EVERY, sampled=sampled)
    assert planner.plan.depth == 0
    engine.run(planner, 30 * MAX_EXPLORE_INTERVAL, sampled=sampled)
    assert planner.plan.depth > 0


def test_requests_take_turns_in_exploring():
    exploration = Exploration()
    rows = []
    for _ in range(8):
        while exploration.adjust_depth(0, 5) == 0:
            pass
        rows.extend(exploration.pick_rows(16).tolist())
    assert set(rows) == set(range(16))
