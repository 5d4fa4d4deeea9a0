"""Whatever goes wrong between policy and drafter, the engine goes on as vLLM does."""

import itertools
import logging
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest

from policies.types import DraftSelection
from serving.engine.shared.faults import select_checked
from tests.engine.checks import Arrival, draw_prompts, greedy
from tests.engine.made_up import plan_instead

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

PROMPTS = draw_prompts(4)
PARAMS = greedy(16)
DEPTH = 4

LOGGER = "serving.engine.shared.faults"

FIRST = np.arange(DEPTH) == 0
"""The first position of every draft."""


@pytest.fixture(scope="module")
def expected(plain):
    """What the target alone answers."""
    return plain.answer(PROMPTS, PARAMS)


@pytest.fixture
def engine(tetris):
    """Drafts of `DEPTH`, of which the policy verifies half."""
    return tetris


def raise_error(*args):
    raise RuntimeError("a bug in the policy")


def admit(change, **figures):
    """Make a selection that is wrong in a given way."""
    return lambda batch: DraftSelection(
        **{"num_admitted": change(batch.num_draft_tokens), "draft_budget": 8, **figures}
    )


@pytest.fixture
def depths(engine, monkeypatch):
    """How deep each step drafts, as its scheduler hears of it; the last need none."""
    found, receive = [], engine.scheduler.update_draft_token_ids

    def receive_noted(drafts):
        found.append(max(map(len, drafts.draft_token_ids), default=0))
        receive(drafts)

    monkeypatch.setattr(engine.scheduler, "update_draft_token_ids", receive_noted)
    return found


def damage_confidence(engine, monkeypatch, damage):
    """Let the scheduler receive other confidences than the worker recorded."""
    scheduler = engine.scheduler
    receive = scheduler.update_draft_token_ids

    def receive_damaged(drafts):
        if drafts.confidence is not None:
            drafts = replace(drafts, confidence=damage(drafts.confidence))
        receive(drafts)

    monkeypatch.setattr(scheduler, "update_draft_token_ids", receive_damaged)


@pytest.mark.parametrize(
    ("select", "damage", "fault"),
    [
        pytest.param(raise_error, None, "policy_error", id="raises"),
        pytest.param(admit(lambda n: n + 1), None, "policy_error", id="too many"),
        pytest.param(None, lambda c: None, "confidence_missing", id="none"),
        pytest.param(
            None, lambda c: np.where(FIRST, np.nan, c), "confidence_invalid", id="NaN"
        ),
        pytest.param(
            None, lambda c: np.where(FIRST, 1.5, c), "confidence_invalid", id="above 1"
        ),
        pytest.param(None, lambda c: c[:-1], "confidence_invalid", id="row too few"),
        pytest.param(None, lambda c: c.ravel(), "confidence_invalid", id="flat"),
    ],
)
def test_where_nothing_can_be_selected_everything_is_verified(
    select, damage, fault, engine, expected, monkeypatch, caplog
):
    if select is not None:
        plan_instead(engine.scheduler, select=select)
    else:
        damage_confidence(engine, monkeypatch, damage)
    counters = engine.counters
    with caplog.at_level(logging.WARNING, logger=LOGGER), engine.watch() as steps:
        assert engine.answer(PROMPTS, PARAMS) == expected
    assert counters.num_accepted_tokens > 0
    # Nothing is cut but what the token limit makes useless.
    assert counters.num_cut_tokens["budget"] == 0
    verified = sum(sum(step.num_drafts.values()) for step in steps)
    assert verified == counters.num_proposed_tokens - counters.num_cut_tokens["length"]
    assert max(max(step.num_drafts.values(), default=0) for step in steps) == DEPTH
    # Counted always, and logged once.
    assert set(counters.num_fallbacks) == {fault}
    assert counters.num_fallbacks[fault] > 1
    [message] = [r for r in caplog.records if r.name == LOGGER]
    assert fault in message.getMessage()
    assert message.exc_info or fault != "policy_error"


@pytest.mark.parametrize(
    "misbehave",
    [
        pytest.param(lambda batch: None, id="returns nothing"),
        pytest.param(admit(lambda drafts: drafts[1:]), id="forgets a request"),
        pytest.param(admit(lambda drafts: drafts - 5), id="admits less than none"),
        pytest.param(admit(lambda drafts: drafts / 2), id="admits halves"),
        pytest.param(admit(lambda drafts: None), id="admits nobody knows what"),
        pytest.param(admit(np.copy, draft_budget=2.5), id="has half a budget"),
        pytest.param(admit(np.copy, expected_accepted=None), id="expects nothing"),
        pytest.param(admit(np.copy, expected_accepted=np.inf), id="expects too much"),
        pytest.param(admit(np.copy, num_cut_by_latency=None), id="cuts nobody knows"),
    ],
)
def test_what_no_batch_can_be_cut_by_is_no_selection(misbehave):
    """At the gate that both adapters' selections pass."""
    batch = SimpleNamespace(num_draft_tokens=np.array([4, 2]))
    good = SimpleNamespace(select=admit(np.copy))
    assert select_checked(good, batch).num_admitted.tolist() == [4, 2]
    with pytest.raises((TypeError, ValueError, AttributeError)):
        select_checked(SimpleNamespace(select=misbehave), batch)


@pytest.mark.parametrize(
    ("answer", "depth"), [(-3, 0), (99, DEPTH), (2.0, 2), ("many", DEPTH)]
)
def test_an_impossible_depth_becomes_a_possible_one(
    answer, depth, engine, depths, expected
):
    plan_instead(engine.scheduler, choose_depth=lambda *load: answer)
    assert engine.answer(PROMPTS, PARAMS) == expected
    assert depths[0] == max(depths) == depth


PLACES = [
    (
        "scheduler._planner",
        "observe observe_timing forget plan_batch choose_depth report",
        "policy_error",
    ),
    ("scheduler._drafts.rooms", "of", "drafts_error"),
    ("scheduler._clock", "note_worker discard finish start", "timing_error"),
    ("scheduler._selector", "_make_batch _admit", "selection_error"),
    ("scheduler._batch.mix", "note", "limits_error"),
    ("scheduler._batch.limits", "measure_load", "limits_error"),
    ("scheduler._batch.ageing", "look", "ageing_error"),
    ("scheduler._selector", "count_dropped", "count_error"),
    ("scheduler._classes", "tightest_target_ms", "depth_error"),
    ("scheduler", "_choose_depth", "depth_error"),
    ("scheduler._skipping", "is_due note_planned", "skip_error"),
    ("scheduler.counters", "count_verification", "outcome_error"),
    ("scheduler._classes", "forget", "forget_error"),
    ("scheduler._batch.limits", "note_finished", "forget_error"),
    ("scheduler._drafts.rooms", "forget", "forget_error"),
    ("scheduler._watchdog", "begin_step observe", "watchdog_error"),
    ("scheduler._drafts", "locate", "watchdog_error"),
    ("scheduler.board", "start_step note_drafts note_outcome", "board_error"),
    ("runner.drafter", "take_confidence take_times _record", "report_error"),
    ("runner._cold", "look fill_backlog", "drafter_error"),
    ("serving.engine.shared.batch_planning", "trim_to_free_blocks", "kv_error"),
    ("serving.engine.cpu.scheduler", "read_outcomes", "outcome_error"),
    ("serving.engine.cpu.selection", "count_coming_prompt_tokens", "selection_error"),
]
"""Parts of an engine, or modules; of each some functions; and the label of a fault."""


@pytest.mark.parametrize(
    ("part", "function", "reason"),
    [(part, one, reason) for part, some, reason in PLACES for one in some.split()],
)
def test_a_fault_of_a_part_costs_no_token_and_has_a_label_of_its_own(
    part, function, reason, engine, depths, expected, monkeypatch
):
    if part.startswith("serving."):
        monkeypatch.setattr(f"{part}.{function}", raise_error)
    else:
        # Some have slots, and no place for a method of their own.
        monkeypatch.setattr(type(attrgetter(part)(engine)), function, raise_error)
    scheduler = engine.scheduler
    if reason == "board_error":
        scheduler.board.watch(0)
    # More than may run, so that some wait.
    assert engine.answer(PROMPTS * 5, PARAMS) == expected * 5
    scheduler.snapshot()
    scheduler.board.is_watched = False
    faults = scheduler.counters.num_fallbacks
    assert faults[reason] > 0
    assert ("policy_error" in faults) == (reason == "policy_error")
    if reason == "policy_error":
        assert depths[0] == DEPTH
    monkeypatch.undo()
    faults.clear()
    # Nothing of it is left.
    with engine.watch() as steps:
        assert engine.answer(PROMPTS, PARAMS) == expected
    assert faults == {}
    assert sum(sum(step.num_drafts.values()) for step in steps) > 0


class Stopping:
    """An order to look between passes whether to go on, which cannot be followed."""

    def start(self, req_ids):
        return self

    def should_continue(self, confidence, ended):
        raise RuntimeError("a bug in the rule")


@pytest.mark.parametrize("stop", [Stopping(), "no rule at all"])
def test_a_rule_that_cannot_end_a_draft_lets_it_go_on(stop, engine, depths, expected):
    plan_instead(engine.scheduler, early_exit=lambda *_: stop)
    assert engine.answer(PROMPTS, PARAMS) == expected
    assert set(engine.counters.num_fallbacks) == {"stop_error"}
    assert depths[0] == DEPTH


def drive_and_learn(engine, expected):
    """Drive the prompts; return the drafts verified, and requests learnt from, a step.

    Of the first four steps that draft.
    """
    outcomes = []
    plan_instead(engine.scheduler, observe=outcomes.append)
    arrivals = [Arrival(f"r{i}", p, PARAMS) for i, p in enumerate(PROMPTS)]
    with engine.watch() as steps:
        answers = engine.drive(arrivals)
    assert [[answers[a.name]] for a in arrivals] == expected
    learnt = [len(outcome.req_ids) for outcome in outcomes[1:5]]
    return [sum(step.num_drafts.values()) for step in steps[1:5]], learnt


def test_drafts_half_taken_in_are_verified_whole_and_teach_nothing(
    engine, expected, monkeypatch
):
    """The second of four requests fails in the second step that drafts."""
    counters, rooms = engine.counters, type(engine.scheduler._drafts.rooms)
    of = rooms.of

    def fail_once(rooms, request):
        is_second = counters.num_steps == 2
        if is_second and request.spec_token_ids and request.request_id[:2] == "r1":
            raise RuntimeError("a bug")
        return of(rooms, request)

    monkeypatch.setattr(rooms, "of", fail_once)
    assert drive_and_learn(engine, expected) == ([8, 16, 8, 8], [4, 0, 4, 4])
    assert counters.num_fallbacks == {"drafts_error": 1}


def test_one_bad_confidence_spoils_its_own_step_only(engine, expected, monkeypatch):
    """Four requests have four drafts each, of which the policy verifies eight."""
    received = itertools.count(1)

    def spoil_third_and_fourth(confidence):
        spoilt = confidence.copy()
        if next(received) in (3, 4):
            spoilt[1, 2] = np.nan
        return spoilt

    damage_confidence(engine, monkeypatch, spoil_third_and_fourth)
    assert drive_and_learn(engine, expected) == ([8, 8, 16, 16], [4, 4, 0, 0])
    assert engine.counters.num_fallbacks == {"confidence_invalid": 2}
