"""Stand-ins for what needs a GPU; every name says so."""

from types import SimpleNamespace

import torch

from serving.engine.gpu.copy import DeviceReader
from serving.engine.gpu.verification import PlannedVerification


def stand_in_manager(max_num_reqs, depth, max_total_logits):
    """Hold what vLLM's manager holds, on the CPU: its constructor makes streams."""
    query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
    return SimpleNamespace(
        num_speculative_steps=depth,
        num_bonus_tokens=1,
        query_start_loc=query_start_loc,
        _max_total_logits=max_total_logits,
        _batch_budget=None,
        _confidence_probs=torch.ones(max_num_reqs, depth),
        _batch_draft_capacity=torch.zeros(max_num_reqs, dtype=torch.int32),
        _num_non_draft_tokens=torch.zeros(max_num_reqs, dtype=torch.int32),
        _cu_num_logits=torch.zeros(max_num_reqs + 1, dtype=torch.int32),
    )


def make_verification(
    max_num_reqs=8, depth=3, *, max_total_logits=10_000, num_draft_passes=None
):
    """Make our manager over a stand-in of vLLM's, for a group of one rank."""
    return PlannedVerification(
        stand_in_manager(max_num_reqs, depth, max_total_logits),
        tp_group=SimpleNamespace(broadcast=lambda tensor, src: tensor),
        num_draft_passes=num_draft_passes or depth,
        reader=DeviceReader(torch.device("cpu")),
    )


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
        assert self._time_ms is not None
        assert end._time_ms is not None
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
