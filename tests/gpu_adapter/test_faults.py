"""Whatever goes wrong on the way to a decision, a GPU engine's requests go on."""

from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest

from serving.engine.gpu.step_messages import REPORT_ATTRIBUTE
from tests.gpu_adapter.conftest import DEPTH
from tests.gpu_adapter.stand_in_worker import drive
from tests.gpu_adapter.test_scheduler import add, make_worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("confidence", [np.nan, np.inf, 1.5, -0.5])
def test_one_impossible_confidence_is_dropped_and_speculation_goes_on(
    confidence, make_scheduler
):
    scheduler = make_scheduler()
    requests = add(scheduler, 3, max_tokens=150)
    worker = make_worker(3)
    execute = worker.execute

    def report_nonsense_once(output):
        result = execute(output)
        report = getattr(result, REPORT_ATTRIBUTE)
        if len(worker.steps) == 10:
            spoilt = report.verification.confidence.copy()
            spoilt[1, 0] = confidence
            verification = replace(report.verification, confidence=spoilt)
            setattr(
                result, REPORT_ATTRIBUTE, replace(report, verification=verification)
            )
        return result

    worker.execute = report_nonsense_once
    drive(scheduler, worker, max_steps=1000)
    assert [request.num_output_tokens for request in requests] == [150] * 3
    assert scheduler.counters.num_fallbacks == {"confidence_invalid": 1}
    state = scheduler._planner.acceptance.calibration.export_state()
    assert state["slope"] > 0
    assert np.isfinite(state["intercept"]).all()
    late = worker.steps[20:]
    assert sum(step.num_verified for step in late) > len(late)


def test_a_request_with_impossible_confidences_spoils_no_others(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 2, max_tokens=100)
    worker = make_worker(2)
    execute = worker.execute
    learnt = []

    def report_nonsense(output):
        result = execute(output)
        report = getattr(result, REPORT_ATTRIBUTE)
        if report.verification is not None:
            spoilt = report.verification.confidence.copy()
            spoilt[report.verification.req_ids.index("r1")] = np.nan
            verification = replace(report.verification, confidence=spoilt)
            setattr(
                result, REPORT_ATTRIBUTE, replace(report, verification=verification)
            )
        return result

    worker.execute = report_nonsense
    scheduler._planner = Listening(scheduler._planner, learnt)
    drive(scheduler, worker, max_steps=20)
    assert set(learnt) == {"r0"}
    assert scheduler.counters.num_fallbacks["confidence_invalid"] > 5
    assert scheduler._outcomes.confidence.guess(["r0"], DEPTH).min() > 0


@pytest.mark.parametrize(
    ("owner", "method", "reason"),
    [
        ("_offers", "drop_useless", "drafts_error"),
        ("", "_make_batch", "selection_error"),
        ("_offers", "trim", "selection_error"),
        ("_batch.pace", "note", "limits_error"),
        ("_batch.ageing", "look", "ageing_error"),
        ("", "_choose_depth", "depth_error"),
        ("_orders.loads", "note", "order_error"),
        ("_classes", "weigh", "selection_error"),
        ("", "_count_proposed", "count_error"),
        ("_orders.loads", "match", "timing_error"),
        ("counters", "count_verification", "outcome_error"),
        ("_outcomes.confidence", "note", "outcome_error"),
        ("_outcomes.confidence", "forget", "forget_error"),
        ("_batch.limits", "note_finished", "forget_error"),
    ],
)
def test_a_fault_of_our_own_costs_no_token_and_has_a_label_of_its_own(
    owner, method, reason, make_scheduler, monkeypatch
):
    scheduler = make_scheduler(policy="tetris")
    part = attrgetter(owner)(scheduler) if owner else scheduler
    monkeypatch.setattr(type(part), method, fail)
    requests = add(scheduler, 6)
    drive(scheduler, make_worker(6))
    assert [request.num_output_tokens for request in requests] == [40] * 6
    faults = scheduler.counters.num_fallbacks
    assert faults[reason] > 0
    assert "policy_error" not in faults
    assert not scheduler._orders


@pytest.mark.parametrize("method", ["_select", "_give_order", "_set_depth"])
def test_a_step_without_a_decision_verifies_all_its_drafts(
    method, make_scheduler, monkeypatch
):
    scheduler = make_scheduler(policy="tetris")
    monkeypatch.setattr(type(scheduler), method, fail)
    requests = add(scheduler, 3)
    worker = make_worker(3)
    drive(scheduler, worker)
    assert [request.num_output_tokens for request in requests] == [40] * 3
    assert {step.depth for step in worker.steps} == {DEPTH}
    if method != "_set_depth":
        assert all(step.num_verified == step.num_offered for step in worker.steps)
    assert scheduler.counters.num_verified_tokens > 0


@pytest.mark.parametrize("method", ["start_step", "note_drafts", "note_outcome"])
def test_a_board_that_fails_is_not_taken_for_the_policy(
    method, make_scheduler, monkeypatch
):
    scheduler = make_scheduler(policy="tetris")
    monkeypatch.setattr(type(scheduler.board), method, fail)
    scheduler.board.watch(0)
    requests = add(scheduler, 3)
    drive(scheduler, make_worker(3))
    assert [request.num_output_tokens for request in requests] == [40] * 3
    assert set(scheduler.counters.num_fallbacks) == {"board_error"}


def fail(*_, **__):
    raise RuntimeError("a bug of our own")


class Listening:
    """A planner that notes whose outcomes it is told."""

    def __init__(self, planner, learnt):
        self._planner, self._learnt = planner, learnt

    def __getattr__(self, name):
        return getattr(self._planner, name)

    def observe(self, outcome):
        self._learnt.extend(outcome.req_ids)
        self._planner.observe(outcome)
