"""vLLM's real asynchronous scheduler under our decisions, with a stand-in worker."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from policies.types import DraftSelection
from serving.engine.gpu.offers import DraftOffers
from serving.engine.shared.counters import SpeculationCounters
from tests.engine.made_up import plan_instead
from tests.engine.stand_in_worker import add_requests
from tests.gpu_adapter.conftest import DEPTH, GRAPH_SIZES, MAX_TOKENS
from tests.gpu_adapter.stand_in_worker import drive, make_worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("policy", ["fixed", "tetris", "dynamic", "goodput"])
def test_every_request_gets_all_its_tokens_and_figures_add_up(policy, make_scheduler):
    scheduler = make_scheduler(policy=policy)
    requests = add_requests(scheduler, 6)
    off = {"speculative_decoding": "off"}
    requests += add_requests(scheduler, 1, prefix="off", extra_args=off)
    worker = make_worker(6, off0=0.7)
    drive(scheduler, worker)
    assert [request.num_output_tokens for request in requests] == [40] * 7
    assert max(step.num_tokens for step in worker.steps) <= MAX_TOKENS
    counters = scheduler.counters
    assert counters.num_fallbacks == {}
    assert counters.num_steps == len(worker.steps)
    for step in worker.steps:
        assert step.num_verified == step.order.draft_budget <= step.num_offered
    num_verified = sum(step.num_verified for step in worker.steps)
    assert counters.num_verified_tokens == num_verified > 0
    assert 0 < counters.num_accepted_tokens <= num_verified
    # What was drafted after a request's last token is proposed and never scheduled.
    cut = counters.num_cut_tokens
    num_cut = cut.total() - cut["depth"]
    assert counters.num_proposed_tokens >= num_verified + num_cut
    assert cut["opt_out"] > 0
    assert cut["length"] > 0
    num_drafting = sum(step.num_drafting for step in worker.steps)
    assert counters.num_proposed_tokens + cut["depth"] == DEPTH * num_drafting
    assert counters.planning_seconds_total > counters.selection_seconds_total > 0
    assert len(scheduler._outcomes.confidence) == 0
    assert not scheduler._offers
    assert not scheduler._orders
    if policy == "goodput":
        assert len(scheduler._planner.acceptance.calibration._requests) <= 1


@pytest.mark.parametrize("policy", ["tetris", "goodput"])
def test_what_a_connector_keeps_after_its_end_is_forgotten(policy, make_scheduler):
    """It is kept as long as its KV cache is being sent.

    A step may have been in flight when it ended.
    """
    scheduler = make_scheduler(policy=policy)
    scheduler._free_blocks = lambda request: None
    requests = add_requests(scheduler, 6)
    drive(scheduler, make_worker(6))
    assert scheduler.requests.keys() == {one.request_id for one in requests}
    assert scheduler.counters.num_fallbacks == {}
    assert len(scheduler._outcomes.confidence) == 0
    if policy == "goodput":
        assert not scheduler._planner.acceptance.calibration._requests


@pytest.mark.parametrize(
    ("method", "ends_at"), [("draft_model", 100), ("eagle3", 200), ("mtp", 200)]
)
def test_a_head_on_the_targets_positions_drafts_as_far_as_those_go(method, ends_at):
    """And a model of its own as far as its context."""
    speculative = SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(max_model_len=100),
        max_num_new_slots_for_drafting=0,
    )
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative), max_model_len=200
    )
    offers = DraftOffers(scheduler, SpeculationCounters("tetris", method, DEPTH))

    def can_draft(num_tokens):
        request = SimpleNamespace(
            sampling_params=None,
            num_tokens=num_tokens,
            num_output_tokens=1,
            num_output_placeholders=0,
            max_tokens=1000,
            is_prefill_chunk=False,
        )
        return offers.can_draft(request, 0)

    # A draft and the token after it must have room.
    assert can_draft(ends_at - 2)
    assert not can_draft(ends_at + 1)


def test_what_is_left_out_is_counted_for_the_reason_it_was(make_scheduler):
    """Of 2 x 4 drafts, 2 are verified and 3 come too late; every third step probes."""
    scheduler = make_scheduler(policy="tetris", extra_draft_tokens=3)
    planner, probes = scheduler._planner, itertools.cycle([False, False, True])

    def select_late(batch):
        selection = planner.select(batch)
        return replace(selection, num_cut_by_latency=3, is_probe=next(probes))

    plan_instead(scheduler, select=select_late)
    add_requests(scheduler, 2, max_tokens=300)
    drive(scheduler, make_worker(2), max_steps=30)
    cut = scheduler.counters.num_cut_tokens
    assert cut["latency"] == pytest.approx(3 * 29, abs=6)
    assert cut["budget"] == pytest.approx(2 * cut["probe"], rel=0.25)


def test_whoever_watches_sees_what_the_device_admitted(make_scheduler):
    scheduler = make_scheduler(policy="tetris")
    add_requests(scheduler, 3)
    scheduler.board.watch(0, with_ids=True)
    worker = make_worker(3)
    drive(scheduler, worker, max_steps=10)
    seen = scheduler.board.watch(0)
    assert seen["totals"]["steps"] == 9
    first_steps = worker.steps[:9]
    admitted = sum(step.num_verified for step in first_steps)
    assert seen["totals"]["admitted"] == admitted > 0
    assert seen["totals"]["drafted"] == sum(step.num_offered for step in first_steps)
    requests = [one for step in seen["steps"] for one in step["requests"]]
    assert any(one["survival"] for one in requests)
    # Which tokens were drafted is known to the device alone.
    assert all(one["draft_ids"] == [] for one in requests)


def test_synchronous_scheduling_is_refused_with_its_remedy(make_scheduler):
    needed = r"needs vLLM's asynchronous .* engine\.adapter"
    with pytest.raises(ValueError, match=needed):
        make_scheduler(is_async=False)


def select_every_other(may_reallocate, batch):
    """Verify two drafts of every second request, whatever they look like."""
    admitted = np.minimum(batch.num_draft_tokens, 2)
    admitted[::2] = 0
    return DraftSelection(admitted, int(admitted.sum()), may_reallocate=may_reallocate)


@pytest.mark.parametrize("may_reallocate", [False, True])
def test_a_selection_holds_unless_it_may_be_reallocated(may_reallocate, make_scheduler):
    scheduler = make_scheduler()
    select = partial(select_every_other, may_reallocate)
    plan_instead(scheduler, select=select, choose_depth=lambda *_: DEPTH)
    add_requests(scheduler, 4)
    worker = make_worker(4)
    drive(scheduler, worker, max_steps=10)
    busy = [step for step in worker.steps if step.num_verified]
    assert busy
    for step in busy:
        assert step.num_verified == step.order.draft_budget == 4
        # The device has a choice only among what is offered.
        assert step.num_offered == (4 * DEPTH if may_reallocate else 4)


def test_where_all_drafts_are_verified_ends_do_not_cut_them(make_scheduler):
    """One request with fewer would cost all of them their graph of a whole step."""
    scheduler = make_scheduler(policy="fixed", graphs=False)
    assert scheduler._plain_reason is not None
    add_requests(scheduler, 1)
    worker = make_worker(1)
    drive(scheduler, worker)
    assert {step.num_offered for step in worker.steps} == {0, DEPTH}


def test_the_pause_between_two_batches_is_no_cost_of_a_step(make_scheduler):
    """A step that emits nothing any more is still in flight during the pause."""
    scheduler, timings = make_scheduler(policy="fixed"), []
    plan_instead(scheduler, observe_timing=timings.append)
    worker = make_worker(2, late0=0.7)
    queue = []
    for prefix in ("r", "late"):
        add_requests(scheduler, 2 if prefix == "r" else 1, prefix=prefix)
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            queue.append((output, worker.execute(output)))
            if len(queue) == 2:
                scheduler.update_from_output(*queue.pop(0))
        assert queue, "no step is left in flight, which is what this is about"
        # Nothing runs for a second, on the device's clock.
        worker.device.queue(1000.0)
    scheduler.update_from_output(*queue.pop(0))
    assert len(timings) > 5
    assert max(timing.host_ms for timing in timings) < 1.0


def test_prompts_get_the_room_of_drafts_that_are_not_verified(make_scheduler):
    """Upstream charges every placeholder and leaves the prompt waiting longer."""
    scheduler = make_scheduler(policy="tetris", extra_draft_tokens=3)
    add_requests(scheduler, 7, max_tokens=100)
    worker = make_worker(7, 0.5, late0=0.5)
    drive(scheduler, worker, max_steps=6)
    add_requests(scheduler, 1, prompt_len=90, prefix="late")
    drive(scheduler, worker, max_steps=3)
    assert max(step.num_tokens for step in worker.steps) <= MAX_TOKENS
    # Less 7 requests with a token, the one draft of four that is verified, and the slot
    # that a draft model adds, and less that slot of the prompt.
    prefill = max(step.num_prefill_tokens for step in worker.steps[6:])
    assert prefill == MAX_TOKENS - 7 * (1 + 1 + 1) - 1


def test_the_planner_prices_a_pass_as_the_graph_it_replays(make_scheduler):
    cost = make_scheduler(capture_sizes=GRAPH_SIZES[::-1])._planner.cost
    assert cost.target.at(17) == cost.target.at(24) < cost.target.at(25)
    assert cost.draft_first.at(17) == cost.draft_first.at(24)
    # Larger than any graph.
    assert cost.target.at(33) < cost.target.at(34)
    without = make_scheduler(graphs=False, capture_sizes=GRAPH_SIZES)
    assert without._planner.cost.padded_sizes == ()
