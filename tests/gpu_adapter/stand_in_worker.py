"""A worker without models: real decisions of our manager, invented tokens and times."""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

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
from tests.gpu_adapter.stand_ins import StandInDevice, make_verification


@dataclass
class StandInStep:
    """What a step turned out to be."""

    num_offered: int
    num_verified: int
    num_tokens: int
    num_prefill_tokens: int
    depth: int
    num_drafting: int
    order: Any


@dataclass
class _Slot:
    index: int
    prompt_len: int
    num_computed: int


class StandInWorker:
    """Runs scheduled steps as the runner would, down to stale columns.

    A target's pass takes 5 ms and .01 for each token, a drafter's .5, and the gap
    between two steps .3.

    Args:
        acceptance: Probability of each request's draft tokens, by request id; also
            what its confidences are.
        max_num_reqs: Slots.
    """

    def __init__(self, acceptance, max_num_reqs=8):
        self.acceptance = acceptance
        self.steps = []
        self.device = StandInDevice()
        self._max_num_reqs = max_num_reqs
        self._rng = np.random.default_rng(0)
        self._slots = {}
        self._free = deque(range(max_num_reqs))
        self._verification = make_verification(max_num_reqs, DEPTH)
        self._clock = DeviceClock(self.device.make_event)

    def execute(self, output):
        """Run one step; the device is two steps behind with its clock."""
        for req_id in output.finished_req_ids:
            if req_id in self._slots:
                self._free.append(self._slots.pop(req_id).index)
        for new in output.scheduled_new_reqs:
            slot = _Slot(
                self._free.popleft(),
                len(new.prompt_token_ids),
                new.num_computed_tokens,
            )
            self._slots[new.req_id] = slot
            self._verification.add_request(slot.index)
        order = getattr(output, ORDER_ATTRIBUTE, None)
        if order is not None:
            self._clock.begin(order.step_id)
        self.device.queue(0.3)
        self._clock.mark_forward_start()
        drafts = output.scheduled_spec_decode_tokens
        num_tokens = output.num_scheduled_tokens
        # Requests with drafts first, as the runner sorts them.
        req_ids = sorted(num_tokens, key=lambda req_id: not drafts.get(req_id))
        total, admitted, verified = self._verify(output, order, req_ids)
        self.device.queue(5.0 + 0.01 * total)
        self._clock.mark_target_end()
        sampled = [self._sample(r, num_tokens[r], drafts, admitted) for r in req_ids]
        depth = output.num_spec_tokens_to_schedule
        self._draft(req_ids, depth)
        self.device.queue(0.5)
        self._clock.mark_draft_first_end()
        self.device.queue(0.5 * max(0, depth - 1))
        self._clock.mark_draft_end()
        rows = {req_id: row for row, req_id in enumerate(req_ids)}
        result = ModelRunnerOutput(req_ids, rows, sampled)
        if order is not None:
            times = self._clock.read_finished()
            report = StepReport(order.step_id, verified, times, self._take_profile())
            setattr(result, REPORT_ATTRIBUTE, report)
        self.device.now_ms = self.device.queued_ms
        self.steps.append(
            StandInStep(
                sum(map(len, drafts.values())),
                sum(admitted.values()),
                total,
                sum(n for r, n in num_tokens.items() if n > 1 + len(drafts.get(r, ()))),
                depth,
                sum(map(bool, sampled)),
                order,
            )
        )
        return result

    def _take_profile(self):
        """Report once what upstream would have timed at start-up."""
        if self.steps:
            return None
        sizes = (1, 2, 4, 8, 16, 32, 64)
        target_ms = tuple(5.0 + 0.01 * size for size in sizes)
        return CostProfile(sizes, target_ms, (0.5,) * len(sizes))

    def _verify(self, output, order, req_ids):
        drafts = output.scheduled_spec_decode_tokens
        if not drafts:
            return output.total_num_scheduled_tokens, dict.fromkeys(req_ids, 0), None
        self._verification.take_order(order)
        total = self._verification.get_num_tokens(output.num_scheduled_tokens, drafts)
        slots = torch.tensor([self._slots[req_id].index for req_id in req_ids])
        self._verification.reallocate_drafts(req_ids, slots)
        verified = self._verification.take_verified()
        confidence, num_admitted = verified.copy.read()
        admitted = dict(zip(req_ids, num_admitted.tolist(), strict=True))
        report = VerificationReport(verified.req_ids, confidence, num_admitted)
        return total, admitted, report

    def _sample(self, req_id, num_tokens, drafts, admitted):
        slot = self._slots[req_id]
        num_drafts = len(drafts.get(req_id, ()))
        if slot.num_computed + num_tokens - num_drafts < slot.prompt_len:
            slot.num_computed += num_tokens
            return []
        is_rejected = self._rng.random(admitted[req_id]) >= self.acceptance[req_id]
        num_accepted = int((is_rejected.cumsum() == 0).sum())
        slot.num_computed += num_tokens - num_drafts + num_accepted
        return [7] * (num_accepted + 1)

    def _draft(self, req_ids, depth):
        # Columns past the depth hold what earlier batches left there.
        buffer = self._rng.random((self._max_num_reqs, DEPTH))
        for row, req_id in enumerate(req_ids):
            buffer[row, :depth] = self.acceptance[req_id]
        batch = SimpleNamespace(
            num_reqs=len(req_ids),
            idx_mapping=torch.tensor([self._slots[r].index for r in req_ids]),
        )
        self._verification.record_confidences(torch.from_numpy(buffer).float(), batch)


def drive(scheduler, worker, max_steps=500):
    """Schedule one step ahead of the one that runs, as vLLM's engine core does.

    Returns:
        Steps scheduled until no request was left, or `max_steps`.
    """
    queue = deque()
    num_steps = 0
    while (scheduler.has_requests() or queue) and num_steps < max_steps:
        output = scheduler.schedule() if scheduler.has_requests() else None
        if output is not None and output.total_num_scheduled_tokens > 0:
            num_steps += 1
            queue.append((output, worker.execute(output)))
            if len(queue) < 2:
                continue
        if queue:
            scheduler.update_from_output(*queue.popleft())
        elif output is not None:
            scheduler.update_from_output(output, ModelRunnerOutput([], {}))
    return num_steps


def make_worker(num_reqs, acceptance=0.7, **more):
    """Make a worker whose requests `r0`, `r1`, ... all accept alike."""
    chances = {f"r{index}": acceptance for index in range(num_reqs)}
    return StandInWorker(chances | more)
