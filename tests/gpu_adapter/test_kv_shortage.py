"""vLLM's asynchronous scheduler while KV blocks are short."""

from collections import defaultdict

import pytest

from serving.engine.shared import batch_planning
from tests.gpu_adapter.conftest import DEPTH
from tests.gpu_adapter.stand_in_worker import StandInWorker, drive

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def count_preemptions(scheduler):
    """Serve requests of many lengths and count how often one lost its blocks."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    requests = []
    for n in range(40):
        params = SamplingParams(max_tokens=20 + 11 * n % 50, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=2)
        requests.append(Request(f"r{n}", list(range(10, 20 + n % 7)), params, None))
        scheduler.add_request(requests[-1])
    # The stand-in gives a request that comes back another slot.
    worker = StandInWorker(DEPTH, defaultdict(lambda: 0.7), max_num_reqs=400)
    drive(scheduler, worker, max_steps=4000)
    assert all(one.num_output_tokens == one.max_tokens for one in requests)
    assert scheduler.counters.num_fallbacks == {}
    return sum(request.num_preemptions for request in requests)


def test_fewer_requests_are_preempted(make_scheduler, monkeypatch):
    scheduler = make_scheduler(policy="tetris", num_blocks=26)
    num_preemptions = count_preemptions(scheduler)
    assert scheduler.counters.num_cut_tokens["kv"] > 0
    monkeypatch.setattr(batch_planning, "trim_to_free_blocks", lambda _: 0)
    scheduler = make_scheduler(policy="tetris", num_blocks=26)
    num_without = count_preemptions(scheduler)
    assert num_preemptions < num_without
