"""Whatever goes wrong on the way to a decision, a GPU engine's requests go on."""

from operator import attrgetter

import numpy as np
import pytest

from serving.engine.gpu.step_messages import REPORT_ATTRIBUTE
from tests.engine.made_up import plan_instead
from tests.engine.stand_in_worker import add_requests
from tests.gpu_adapter.conftest import DEPTH
from tests.gpu_adapter.stand_in_worker import drive, make_worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults]


def test_a_request_with_impossible_confidences_spoils_no_others(make_scheduler):
    scheduler, learnt = make_scheduler(), []
    add_requests(scheduler, 2, max_tokens=100)
    worker = make_worker(2)

    execute = worker.execute

    def spoil_r1(output):
        result = execute(output)
        report = getattr(result, REPORT_ATTRIBUTE).verification
        if report is not None:
            report.confidence[report.req_ids.index("r1")] = np.nan
        return result

    worker.execute = spoil_r1
    plan_instead(scheduler, observe=lambda outcome: learnt.extend(outcome.req_ids))
    drive(scheduler, worker, max_steps=20)
    assert set(learnt) == {"r0"}
    assert scheduler.counters.num_fallbacks["confidence_invalid"] > 5
    assert scheduler._outcomes.confidence.guess(["r0"], DEPTH).min() > 0


def fail(*_, **__):
    raise RuntimeError("a bug of our own")


def break_method(monkeypatch, scheduler, place):
    """Let a method fail of the scheduler, or of what it holds."""
    owner, _, method = place.rpartition(".")
    part = attrgetter(owner)(scheduler) if owner else scheduler
    monkeypatch.setattr(type(part), method, fail)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("_offers.drop_useless", "drafts_error"),
        ("_make_batch", "selection_error"),
        ("_offers.trim", "selection_error"),
        ("_choose_depth", "depth_error"),
        ("_orders.loads.note", "order_error"),
        ("_count_proposed", "count_error"),
        ("_orders.loads.match", "timing_error"),
        ("counters.count_verification", "outcome_error"),
        ("_outcomes.confidence.note", "outcome_error"),
        ("_outcomes.confidence.forget", "forget_error"),
        ("board.note_drafts", "board_error"),
    ],
)
def test_a_fault_of_our_own_costs_no_token_and_has_a_label_of_its_own(
    place, reason, make_scheduler, monkeypatch
):
    scheduler = make_scheduler(policy="tetris")
    break_method(monkeypatch, scheduler, place)
    scheduler.board.watch(0)
    requests = add_requests(scheduler, 6)
    drive(scheduler, make_worker(6))
    assert [request.num_output_tokens for request in requests] == [40] * 6
    faults = scheduler.counters.num_fallbacks
    assert faults[reason] > 0
    assert "policy_error" not in faults
    assert not scheduler._orders


@pytest.mark.parametrize(
    "place", ["_select", "_give_order", "_set_depth", "_planner.select"]
)
def test_an_undecided_step_verifies_all_drafts(place, make_scheduler, monkeypatch):
    scheduler = make_scheduler(policy="tetris")
    break_method(monkeypatch, scheduler, place)
    requests = add_requests(scheduler, 3)
    worker = make_worker(3)
    drive(scheduler, worker)
    assert [request.num_output_tokens for request in requests] == [40] * 3
    assert {step.depth for step in worker.steps} == {DEPTH}
    if place != "_set_depth":
        assert all(step.num_verified == step.num_offered for step in worker.steps)
    counters = scheduler.counters
    assert counters.num_verified_tokens > 0
    assert (counters.num_fallbacks["policy_error"] > 0) == (place == "_planner.select")
