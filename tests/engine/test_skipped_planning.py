"""Steps at depth 0 in which there is nothing to plan."""

import pytest

from policies.baselines import FixedPlanner
from serving.engine.cpu.skipped_planning import TELL_ALL, TELL_EVERY, SkippedPlanning
from serving.engine.shared.batch_limits import RequestPace
from tests.engine.checks import complete, draw_prompts, greedy, summarize_all
from tests.engine.conftest import run_engine

NUM_REQS = 4


def plan(skipping, depth=0, **other):
    """Plan a step in which every running request gets a token, but for `other`."""
    sizes = {"num_tokens": NUM_REQS, "num_scheduled": NUM_REQS, "num_running": NUM_REQS}
    skipping.note_planned(depth, **(sizes | other))


def settle(**how):
    """Return the state after so many planned steps that the next needs no plan."""
    skipping = SkippedPlanning(**({"is_possible": True} | how))
    for _ in range(TELL_ALL + 1):
        plan(skipping)
    return skipping


def test_the_first_steps_at_depth_0_are_all_planned_and_timed():
    skipping = SkippedPlanning(is_possible=True)
    for _ in range(TELL_ALL):
        assert not skipping.is_due(NUM_REQS, 0)
        plan(skipping)
        assert not skipping.is_quiet


def test_then_one_of_many_is_timed_and_the_next_one_planned():
    skipping = settle()
    planned, timed = [], []
    for step in range(TELL_ALL + 2, TELL_ALL + 2 + 3 * TELL_EVERY):
        if skipping.is_due(NUM_REQS, 0):
            skipping.note_unplanned()
        else:
            planned.append(step)
            plan(skipping)
        if not skipping.is_quiet:
            timed.append(step)

    assert timed == [TELL_ALL + TELL_EVERY * n for n in (1, 2, 3)]
    assert planned == [step + 1 for step in timed]


def test_unplanned_steps_are_counted_until_the_planner_is_asked_again():
    skipping = settle()
    while skipping.is_due(NUM_REQS, 0):
        skipping.note_unplanned()

    assert skipping.num_skipped == TELL_EVERY - 1
    assert skipping.is_unchanged(NUM_REQS)
    assert not skipping.is_unchanged(NUM_REQS - 1)
    plan(skipping)
    assert skipping.num_skipped == 0
    assert not skipping.is_unchanged(NUM_REQS)


@pytest.mark.parametrize(
    ("num_running", "num_waiting"), [(NUM_REQS - 1, 0), (NUM_REQS, 1), (0, 0)]
)
def test_whoever_leaves_or_waits_ends_it(num_running, num_waiting):
    skipping = settle()
    assert skipping.is_due(NUM_REQS, 0)
    assert not skipping.is_due(num_running, num_waiting)


@pytest.mark.parametrize(
    "other", [{"num_tokens": 9}, {"num_scheduled": 3, "num_tokens": 3}, {"depth": 1}]
)
def test_only_the_same_requests_with_a_token_each_may_go_on(other):
    skipping = settle()
    plan(skipping, **other)
    assert not skipping.is_due(NUM_REQS, 0)


def test_drafting_starts_the_count_anew():
    skipping = settle()
    plan(skipping, depth=2)
    plan(skipping)
    assert not skipping.is_quiet
    assert not skipping.is_due(NUM_REQS, 0)


def test_an_engine_that_runs_its_drafter_at_depth_0_plans_every_step():
    skipping = settle(is_possible=False)
    assert not skipping.is_due(NUM_REQS, 0)
    assert not skipping.is_quiet


def test_skipped_steps_weigh_on_the_pace_as_planned_ones_would():
    step_by_step, at_once = RequestPace(), RequestPace()
    for pace in (step_by_step, at_once):
        pace.note(30, 10)
    for _ in range(7):
        step_by_step.note(30, 10)
    at_once.note_skipped_steps(7)

    assert at_once.tokens_per_step > 1.0
    assert at_once.tokens_per_step == pytest.approx(step_by_step.tokens_per_step)


class NeverDrafting(FixedPlanner):
    """Depth 0, and a record of what was asked and told."""

    __slots__ = ("num_asked", "num_skipped", "timings")

    def __init__(self):
        super().__init__(3)
        for name, value in (("num_asked", 0), ("num_skipped", 0), ("timings", [])):
            object.__setattr__(self, name, value)

    def choose_depth(self, num_reqs, latency_target_ms=None):
        object.__setattr__(self, "num_asked", self.num_asked + 1)
        return 0

    def note_skipped_steps(self, num_steps):
        object.__setattr__(self, "num_skipped", self.num_skipped + num_steps)

    def observe_timing(self, timing):
        self.timings.append(timing)


@pytest.mark.vllm
def test_an_engine_skips_planning_between_arrivals_and_ends(tiny_pair):
    target, draft = tiny_pair
    prompts = draw_prompts(6)
    # They end one after the other.
    params = [greedy(30 + 20 * index) for index in range(len(prompts))]
    with run_engine(target) as plain:
        expected = summarize_all(complete(plain, prompts, params))
    with run_engine(target, draft, policy="fixed", draft_tokens=3) as engine:
        planner = engine.scheduler._planner = NeverDrafting()
        outputs = summarize_all(complete(engine, prompts, params))
        counters = engine.scheduler.counters
        num_steps = counters.num_steps
        num_untold = engine.scheduler._skipping.num_skipped

        assert outputs == expected
        # Every step is known of, and in most of them nobody was asked.
        assert planner.num_asked + planner.num_skipped + num_untold == num_steps
        assert planner.num_skipped > planner.num_asked
        assert len(planner.timings) < num_steps / 2
        assert all(timing.depth == 0 for timing in planner.timings)
        num_tokens = sum(30 + 20 * index for index in range(len(prompts)))
        # What drafts would have had, but for the last token of each.
        assert counters.num_cut_tokens["depth"] == 3 * (num_tokens - len(prompts))

        # Who watches sees every step.
        engine.scheduler.board.watch(0)
        num_skipped = planner.num_skipped + num_untold
        complete(engine, prompts, params)
        assert planner.num_skipped == num_skipped
