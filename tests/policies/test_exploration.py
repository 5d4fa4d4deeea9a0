"""Steps that are not the best guess: how often, at what price, and what they teach."""

from dataclasses import replace

import numpy as np
import pytest

from policies.baselines import FixedPlanner
from policies.depth_control import REPLAN_EVERY
from policies.exploration import (
    DOUBTFUL_GAIN,
    EXPLORE_EVERY,
    MAX_BACKLOG_INTERVAL,
    MAX_EXPLORE_INTERVAL,
    MAX_PROBE_SHARE,
    PROBE_EVERY,
    TIME_PASS_EVERY,
    Exploration,
)
from policies.goodput import GoodputPlanner
from policies.registry import build_planner
from policies.types import DraftBatch, PolicySpec, VerificationOutcome
from tests.policies import made_up
from tests.policies.made_up import LIMITS, MAX_DEPTH, MadeUpEngine, make_goodput

NOTHING = VerificationOutcome(np.array([]), np.array([]))


@pytest.fixture(params=["goodput", "dynamic"])
def explorer(request):
    return build_planner(PolicySpec(request.param, max_draft_tokens=MAX_DEPTH), LIMITS)


def run_idle(planner, engine, num_steps):
    """Draft as asked, and verify nothing; return each step's depth and time."""
    depths, steps_ms = [], []
    for _ in range(num_steps):
        depths.append(planner.choose_depth(engine.num_reqs))
        timing = engine.fill_backlog(engine.time(0, depths[-1]))
        planner.observe_timing(timing)
        planner.observe(NOTHING)
        steps_ms.append(timing.total_ms + timing.backlog_ms)
    return depths, np.array(steps_ms)


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again_now_and_then():
    planner, engine = make_goodput(), MadeUpEngine(48, token_ms=5.0)
    engine.run(planner, 200)
    depths, _ = run_idle(planner, engine, 2 * MAX_EXPLORE_INTERVAL)
    num_tries = np.count_nonzero(depths)
    assert 2 <= num_tries <= 2 * MAX_EXPLORE_INTERVAL / EXPLORE_EVERY


def test_steps_that_nobody_asked_about_count_towards_the_next_try(explorer):
    engine = MadeUpEngine(48, token_ms=5.0)
    explorer.fit_profile(engine.profile())
    engine.run(explorer, 200)
    while explorer.choose_depth(48) == 0:
        pass
    # It has just been tried.
    assert explorer.choose_depth(48) == 0
    explorer.note_skipped_steps(MAX_BACKLOG_INTERVAL + MAX_EXPLORE_INTERVAL)
    assert explorer.choose_depth(48) > 0


def test_catching_up_to_explore_takes_a_small_share_of_the_time(explorer):
    """And does not break a latency target that is met without.

    Drafting does not pay: every request holds 100 positions to catch up with, each half
    a millisecond of the drafter's time.
    """
    bound = make_goodput(latency_target_ms=350.0)
    for planner in (explorer, bound):
        engine = MadeUpEngine(48, token_ms=5.0, draft_token_ms=0.5)
        planner.fit_profile(engine.profile())
        run_idle(planner, engine, 8 * MAX_EXPLORE_INTERVAL)  # Learning.
        _, steps_ms = run_idle(planner, engine, 16 * MAX_EXPLORE_INTERVAL)
        plain_ms = engine.time(0, 0).total_ms
        if planner is bound:
            assert steps_ms.max() <= 350.0
        else:
            assert (steps_ms > plain_ms).any()
            assert steps_ms.sum() < 1.01 * plain_ms * steps_ms.size


@pytest.mark.parametrize(("num_planned", "num_skipped"), [(1, 0), (1, 7), (8, 0)])
def test_every_step_that_leaves_the_drafter_out_counts_once_whoever_was_told(
    explorer, num_planned, num_skipped
):
    """At depth 0 a CPU's engine times all steps first, later one in eight.

    While the same requests go on, the other seven are one that was planned and six of
    those that were skipped; while some wait, all eight are planned.
    """
    engine = MadeUpEngine(16, token_ms=5.0, draft_token_ms=0.5)
    explorer.fit_profile(engine.profile())
    run_idle(explorer, engine, 200)
    is_ours = isinstance(explorer, GoodputPlanner)
    backlog = explorer.depth.backlog if is_ours else explorer._backlog
    # It is tried, so that nothing is missing, and it is long until the next try.
    explorer.note_skipped_steps(MAX_BACKLOG_INTERVAL + MAX_EXPLORE_INTERVAL)
    assert explorer.choose_depth(16) > 0
    for _ in range(4):
        explorer.observe(NOTHING)
        explorer.observe_timing(engine.time(0, 1))
    explorer.observe(NOTHING)
    long = replace(engine.time(0, 0), num_context_tokens=100_000)
    for _ in range(48):
        for _ in range(num_planned):
            assert explorer.choose_depth(16) == 0
        if num_skipped:
            explorer.note_skipped_steps(num_skipped)
        explorer.observe(NOTHING)
        explorer.observe_timing(long)
    explorer.observe(NOTHING)
    num_missing = 48 * (num_planned + num_skipped) * 16
    assert backlog.num_positions == num_missing
    # A prompt counts besides; and no more is missing than there is.
    explorer.choose_depth(16)
    explorer.observe_timing(replace(long, num_prefill_tokens=70))
    assert backlog.num_positions == num_missing + 16 + 70
    explorer.choose_depth(16)
    explorer.observe_timing(replace(long, num_context_tokens=90))
    assert backlog.num_positions == 90


@pytest.mark.parametrize("exits_early", [True, False])
def test_a_pass_that_was_not_timed_for_long_is_tried_again(exits_early):
    """A second pass believed too dear is never run, and its price never corrected."""
    limits = replace(LIMITS, exits_early=exits_early)
    planner, engine = GoodputPlanner.build(MAX_DEPTH, limits), MadeUpEngine(1)
    # Of its last passes all but one are learnt.
    engine.run(planner, 97 if exits_early else 100)
    planner.cost.draft_next.fit_profile((1, 64), (1000.0, 1000.0))
    depths, stops = [], []
    for _ in range(3 * TIME_PASS_EVERY):
        depths.append(planner.choose_depth(1))
        stops.append(planner.early_exit(("0",)))
        planner.observe(made_up.outcome_of("0", 0.9, 1))
        planner.observe_timing(engine.time(num_verified=1, depth=1))
    if exits_early:
        assert stops[2 * REPLAN_EVERY].pass_price > 1.0
        # One pass more, in one step, and again after as long.
        free = [stop for stop in stops if stop is not None and stop.pass_price == 0.0]
        assert [stop.max_depth for stop in free] == [2, 2]
    else:
        settled = depths[2 * REPLAN_EVERY :]
        assert set(settled) == {1, 2}
        assert settled.count(2) in (2, 3)


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_believed_hopeless_are_verified_now_and_then(sampled):
    engine, planner = MadeUpEngine(4, token_ms=0.2), make_goodput()
    engine.run(planner, 200, sampled=sampled)
    for _ in range(16):
        planner.acceptance.calibration._intercept[:] = -5.0
        engine.run(planner, REPLAN_EVERY, sampled=sampled)
    assert planner.plan.depth == 0
    for _ in range(30):
        engine.run(planner, MAX_EXPLORE_INTERVAL, sampled=sampled)
        if planner.plan.depth > 0:
            return
    pytest.fail("never drafted again")


def test_requests_take_turns_in_exploring():
    exploration = Exploration()
    rows = []
    for _ in range(8):
        while exploration.adjust_depth(0, 5) == 0:
            pass
        rows.extend(exploration.pick_rows(16).tolist())
    assert set(rows) == set(range(16))


class AlikeDrafts(MadeUpEngine):
    """Drafts that are all alike, and a sampler that judges them in 12 ms."""

    plain_sample_ms = 12.0

    def draw(self, step):
        confidence, acceptance, luck = super().draw(step)
        return np.full_like(confidence, 0.5), np.full_like(acceptance, 0.5), luck

    def time(self, num_verified, depth):
        sample_ms = 12.0 if num_verified else self.plain_sample_ms
        timing = super().time(num_verified, depth)
        return replace(timing, num_drafts=int(num_verified), sample_ms=sample_ms)


@pytest.mark.parametrize("sampled", [False, True])
def test_that_a_plain_step_became_cheap_is_found_out_within_fifty_steps(sampled):
    """Whoever verifies drafts in every step does not see one."""
    engine, plain = (AlikeDrafts(32, token_ms=0.2) for _ in range(2))
    planner = make_goodput()
    planner.fit_profile(engine.profile())
    engine.run(planner, 48, sampled=sampled)
    assert planner.plan.depth > 0
    engine.plain_sample_ms = plain.plain_sample_ms = 2.0
    best = plain.run(FixedPlanner(0), 48)
    assert engine.run(planner, 48, sampled=sampled) > 0.85 * best
    assert planner.plan.depth == 0


@pytest.mark.parametrize(
    ("gain", "interval"),
    [(0.9, EXPLORE_EVERY), (1.0, EXPLORE_EVERY), (1.2, 100), (9.0, PROBE_EVERY)],
)
def test_probes_are_rare_where_drafting_gains_much(gain, interval):
    def probe(num_reqs, **options):
        steps = range(2 * PROBE_EVERY)
        probes = [exploration.is_probing(gain, num_reqs, **options) for _ in steps]
        return np.flatnonzero(probes)

    exploration = Exploration()
    first = [one for one in (8, 16, 32, 64) if gain < DOUBTFUL_GAIN and one < interval]
    found = probe(4)
    usual = found.size - len(first)
    assert np.diff(found, prepend=-1).tolist() == [*first, *[interval] * usual]
    # At another load the price of a plain step is a guess again.
    since = 2 * PROBE_EVERY - 1 - found[-1]
    soon = (first or [interval])[0] - 1 - since
    assert probe(16)[0] == max(0, soon)
    # Beside prompts it waits for another step, as long again.
    exploration = Exploration()
    assert probe(4, has_prompts=True)[0] == 2 * (first or [interval])[0] - 1
    # What it costs: a step's share of what drafting gains.
    assert (gain - 1.0) / interval < 1.05 * MAX_PROBE_SHARE or gain > 2.0


@pytest.mark.parametrize(("targets_ms", "num_probes"), [(None, 5), ([1e6], 0)])
def test_requests_with_a_latency_target_are_seldom_probed(targets_ms, num_probes):
    planner = make_goodput()
    assert planner.plan.gain == 1.0
    latency_targets_ms = None if targets_ms is None else np.array(targets_ms)
    batch = DraftBatch(
        np.array([1]),
        np.array([[0.9]]),
        ("a",),
        1,
        latency_targets_ms=latency_targets_ms,
    )
    probes = [planner.select(batch).is_probe for _ in range(4 * EXPLORE_EVERY)]
    assert sum(probes) == num_probes
