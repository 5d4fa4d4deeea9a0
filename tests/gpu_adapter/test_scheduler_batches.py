"""vLLM's asynchronous scheduler when requests have to wait, and its batches' sizes."""

from collections import defaultdict

import pytest

from serving.engine.compat import AsyncScheduler
from serving.engine.gpu.scheduler import TetrisAsyncScheduler
from serving.engine.gpu.step_messages import VerificationOrder
from serving.engine.shared import batch_planning
from tests.engine.stand_in_worker import add_requests
from tests.gpu_adapter.conftest import DEPTH, GRAPH_SIZES, MAX_TOKENS
from tests.gpu_adapter.stand_in_worker import StandInWorker, drive, make_worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_fewer_requests_are_preempted_where_drafts_give_way(
    make_scheduler, monkeypatch
):
    """And those that are come back and finish."""

    def count_preemptions():
        scheduler = make_scheduler(policy="tetris", num_blocks=26)
        requests = []
        for n in range(40):
            length, prompt_len = 20 + 11 * n % 50, 10 + n % 7
            options = {"max_tokens": length, "prompt_len": prompt_len}
            requests += add_requests(scheduler, 1, prefix=f"{n}-", **options)
        # The stand-in gives a request that comes back another slot.
        worker = StandInWorker(DEPTH, defaultdict(lambda: 0.7), max_num_reqs=400)
        drive(scheduler, worker, max_steps=4000)
        assert all(one.num_output_tokens == one.max_tokens for one in requests)
        assert scheduler.counters.num_fallbacks == {}
        num_cut = scheduler.counters.num_cut_tokens["kv"]
        return sum(request.num_preemptions for request in requests), num_cut

    num_preemptions, num_cut = count_preemptions()
    assert num_cut > 0
    monkeypatch.setattr(batch_planning, "trim_to_free_blocks", lambda _: 0)
    assert num_preemptions < count_preemptions()[0]


def test_the_pause_between_two_batches_is_no_cost_of_a_step(
    make_scheduler, monkeypatch
):
    """A step that emits nothing any more is still in flight during the pause."""
    scheduler = make_scheduler(policy="fixed")
    gaps = []
    monkeypatch.setattr(
        type(scheduler._planner),
        "observe_timing",
        lambda _, timing: gaps.append(timing.host_ms),
    )
    worker = make_worker(2, more={"late0": 0.7})
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
        worker._device.queue(1000.0)
    scheduler.update_from_output(*queue.pop(0))
    assert len(gaps) > 5
    assert max(gaps) < 1.0


def test_prompts_get_the_room_of_drafts_that_are_not_verified(make_scheduler):
    """Upstream charges every placeholder and leaves the prompt waiting longer."""
    first_prefill = {}
    for cls in (AsyncScheduler, TetrisAsyncScheduler):
        scheduler = make_scheduler(cls, policy="tetris", extra_draft_tokens=3)
        add_requests(scheduler, 7, max_tokens=100)
        worker = make_worker(7, 0.5, more={"late0": 0.5})
        if cls is AsyncScheduler:
            order = scheduler._update_after_schedule

            def with_order(output, order=order):
                output.tetris_order = VerificationOrder(1, 7)
                order(output)

            scheduler._update_after_schedule = with_order
        drive(scheduler, worker, max_steps=6)
        add_requests(scheduler, 1, prompt_len=90, prefix="late")
        num_before = len(worker.steps)
        drive(scheduler, worker, max_steps=3)
        first_prefill[cls] = max(
            step.num_prefill_tokens for step in worker.steps[num_before:]
        )
        assert max(step.num_tokens for step in worker.steps) <= MAX_TOKENS
    # 64 tokens a step, less 7 requests with a token, their drafts and the slot that a
    # draft model adds, less that slot of the prompt.
    assert first_prefill[AsyncScheduler] == 64 - 7 * (1 + 4 + 1) - 1
    assert first_prefill[TetrisAsyncScheduler] == 64 - 7 * (1 + 1 + 1) - 1


@pytest.mark.parametrize("policy", ["dynamic", "goodput"])
def test_the_planner_prices_a_pass_as_the_graph_it_replays(policy, make_scheduler):
    cost = make_scheduler(policy=policy, capture_sizes=GRAPH_SIZES[::-1])._planner.cost
    assert cost.target.at(17) == cost.target.at(24) < cost.target.at(25)
    assert cost.draft_first.at(17) == cost.draft_first.at(24)
    # Larger than any graph.
    assert cost.target.at(33) < cost.target.at(34)


def test_an_engine_without_graphs_pads_nothing(make_scheduler):
    scheduler = make_scheduler(graphs=False, capture_sizes=GRAPH_SIZES)
    assert scheduler._planner.cost.padded_sizes == ()
