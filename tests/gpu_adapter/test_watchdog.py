"""On the asynchronous scheduler: drafts that collapse are left out, and come back."""

import pytest

from tests.engine.stand_in_worker import add_requests
from tests.gpu_adapter.conftest import DEPTH
from tests.gpu_adapter.stand_in_worker import StandInWorker, drive

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults]

NUM_REQS = 4
BROKEN = range(30, 80)


class BreakingWorker(StandInWorker):
    """In some steps no draft is accepted, however sure the drafter is."""

    def _sample(self, *drafts):
        sampled = super()._sample(*drafts)
        return sampled[:1] if len(self.steps) in BROKEN else sampled


def test_a_collapse_is_left_alone_tried_and_forgotten(make_scheduler):
    scheduler = make_scheduler(policy="fixed")
    requests = add_requests(scheduler, NUM_REQS, max_tokens=240)
    worker = BreakingWorker({f"r{index}": 0.7 for index in range(NUM_REQS)})
    drive(scheduler, worker)
    assert [request.num_output_tokens for request in requests] == [240] * NUM_REQS
    counters = scheduler.counters
    assert counters.num_quarantines == {"all": 1}
    assert counters.num_fallbacks == {}
    steps = worker.steps
    for step in steps:
        assert step.num_verified == step.order.draft_budget <= step.num_offered
    # Steps are scheduled one ahead: an outcome is known two steps later.
    late = steps[BROKEN.start + 20 : BROKEN.stop]
    assert 0 < sum(step.num_verified for step in late) <= 5 * NUM_REQS
    assert sum(step.depth == 0 for step in late) > 0.7 * len(late)
    again = steps[BROKEN.stop + 50 : BROKEN.stop + 55]
    # Some have ended.
    assert min(step.num_verified for step in again) >= 2 * DEPTH
    assert not scheduler._watchdog.is_active
