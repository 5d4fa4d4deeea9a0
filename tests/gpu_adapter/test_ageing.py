"""vLLM's asynchronous scheduler under urgent load that never ends."""

from collections import defaultdict

import pytest

from serving.engine.shared.ageing import Ageing
from tests.gpu_adapter.conftest import DEPTH
from tests.gpu_adapter.stand_in_worker import StandInWorker, drive

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def make_request(name, priority):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    params.update_from_generation_config({}, eos_token_id=2)
    return Request(name, [10, 11, 12], params, None, priority=priority)


@pytest.mark.parametrize("is_ageing", [True, False])
def test_a_request_that_can_wait_gets_its_turn(is_ageing, make_scheduler, monkeypatch):
    if not is_ageing:
        monkeypatch.setattr(Ageing, "look", lambda _: None)
    scheduler = make_scheduler(scheduling_policy="priority")
    now_s = 0.0
    num_urgent = 0
    scheduler._batch.ageing._clock = lambda: now_s
    schedule = scheduler.schedule

    def schedule_under_load():
        nonlocal now_s, num_urgent
        now_s += 1
        while len(scheduler.waiting) < 12:
            scheduler.add_request(make_request(f"urgent{num_urgent}", 0))
            num_urgent += 1
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", schedule_under_load)
    bulk = make_request("bulk", 5)
    scheduler.add_request(bulk)
    drive(scheduler, StandInWorker(DEPTH, defaultdict(lambda: 0.7)), max_steps=100)
    assert bulk.is_finished() == is_ageing
    assert scheduler.counters.num_aged_requests == is_ageing
    assert num_urgent > 50
