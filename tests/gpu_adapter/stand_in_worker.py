"""A worker without models: invented tokens and times, and decisions as ordered."""

from collections import deque
from types import SimpleNamespace

import numpy as np

from policies.decisions.select import compute_survival, select_drafts
from policies.types import CostProfile
from serving.engine.compat import ModelRunnerOutput
from serving.engine.gpu.clock import DeviceClock
from serving.engine.gpu.step_messages import (
    ORDER_ATTRIBUTE,
    REPORT_ATTRIBUTE,
    StepReport,
    VerificationReport,
)
from tests.gpu_adapter.conftest import DEPTH


class StandInEvent:
    """A mark on a device whose clock the test moves."""

    def __init__(self, device):
        self._device = device
        self._time_ms = None

    def record(self):
        self._time_ms = self._device.queued_ms

    def query(self):
        return self._time_ms is not None and self._time_ms <= self._device.now_ms

    def elapsed_time(self, end):
        assert self.query(), "read before the device got there"
        assert end.query(), "read before the device got there"
        return end._time_ms - self._time_ms


class StandInDevice:
    """A device with a queue: work is queued at once and done later."""

    def __init__(self):
        self.queued_ms = 0.0
        self.now_ms = 0.0

    def make_event(self):
        return StandInEvent(self)

    def queue(self, duration_ms):
        self.queued_ms += duration_ms


class StandInWorker:
    """Runs scheduled steps: a target's pass takes 5 ms, a drafter's .5, the gap .3.

    Args:
        acceptance: Probability of each request's draft tokens, by request id; also
            what its confidences are.

    Attributes:
        steps: What each turned out to be.
    """

    def __init__(self, acceptance):
        self.acceptance = acceptance
        self.steps = []
        self.device = StandInDevice()
        self._rng = np.random.default_rng(0)
        self._prompt_left = {}
        self._clock = DeviceClock(self.device.make_event)

    def execute(self, output):
        """Run one step; the device is two steps behind with its clock."""
        for new in output.scheduled_new_reqs:
            left = len(new.prompt_token_ids) - new.num_computed_tokens
            self._prompt_left[new.req_id] = left
        order = getattr(output, ORDER_ATTRIBUTE, None)
        drafts = output.scheduled_spec_decode_tokens
        # Requests with drafts first, as the runner sorts them.
        counts = output.num_scheduled_tokens
        req_ids = sorted(counts, key=lambda req_id: not drafts.get(req_id))
        offered = np.array([len(drafts.get(req_id, ())) for req_id in req_ids])
        others = np.array([counts[req_id] for req_id in req_ids]) - offered
        chances = np.array([self.acceptance[req_id] for req_id in req_ids])
        confidence = np.repeat(chances[:, None], DEPTH, axis=1)
        budget = int(offered.sum())
        if order is not None:
            budget = min(budget, order.draft_budget)
        admitted = select_drafts(compute_survival(confidence), offered, budget)
        sampled = list(map(self._sample, req_ids, others, admitted))
        depth = output.num_spec_tokens_to_schedule
        rows = {req_id: row for row, req_id in enumerate(req_ids)}
        result = ModelRunnerOutput(req_ids, rows, sampled)
        if order is not None:
            self._take_time(order.step_id, depth)
            as_ranked = tuple(req_ids), confidence.astype(np.float32), admitted
            report = StepReport(
                order.step_id,
                VerificationReport(*as_ranked) if drafts else None,
                self._clock.read_finished(),
                # What upstream would have timed at start-up.
                None if self.steps else CostProfile((1, 64), (5.0, 5.0), (0.5, 0.5)),
            )
            setattr(result, REPORT_ATTRIBUTE, report)
        self.device.now_ms = self.device.queued_ms
        step = SimpleNamespace(
            num_offered=int(offered.sum()),
            num_verified=budget,
            num_tokens=int(others.sum()) + budget,
            num_prefill_tokens=int(others[others > 1].sum()),
            depth=depth,
            num_drafting=sum(map(bool, sampled)),
            order=order,
        )
        self.steps.append(step)
        return result

    def _sample(self, req_id, num_others, num_admitted):
        self._prompt_left[req_id] -= num_others
        if self._prompt_left[req_id] > 0:
            return []
        is_rejected = self._rng.random(num_admitted) >= self.acceptance[req_id]
        return [7] * (1 + int((is_rejected.cumsum() == 0).sum()))

    def _take_time(self, step_id, depth):
        self._clock.begin(step_id)
        self.device.queue(0.3)
        self._clock.mark_forward_start()
        self.device.queue(5.0)
        self._clock.mark_target_end()
        self.device.queue(0.5)
        self._clock.mark_draft_first_end()
        self.device.queue(0.5 * max(0, depth - 1))
        self._clock.mark_draft_end()


def drive(scheduler, worker, max_steps=500):
    """Schedule one step ahead of the one that runs, as vLLM's engine core does.

    Until no request is left, or after that many steps.
    """
    queue, last = deque(), len(worker.steps) + max_steps
    while (scheduler.has_requests() or queue) and len(worker.steps) < last:
        output = scheduler.schedule() if scheduler.has_requests() else None
        if output is not None and output.total_num_scheduled_tokens > 0:
            queue.append((output, worker.execute(output)))
            if len(queue) < 2:
                continue
        if queue:
            scheduler.update_from_output(*queue.popleft())
        elif output is not None:
            scheduler.update_from_output(output, ModelRunnerOutput([], {}))


def make_worker(num_reqs, acceptance=0.7, **more):
    """Make a worker whose requests `r0`, `r1`, ... all accept alike."""
    chances = {f"r{index}": acceptance for index in range(num_reqs)}
    return StandInWorker(chances | more)
