"""Stand-ins for what needs a GPU; every name says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from serving.engine.gpu.copy import DeviceReader
from serving.engine.gpu.verification import PlannedVerification

CPU = torch.device("cpu")


class StandInGroup:
    """A tensor-parallel group of one process: rank 0's tensor, or its own."""

    def __init__(self, rank: int = 0, of_rank_0: list[torch.Tensor] | None = None):
        """Share `of_rank_0` between the ranks of one group, rank 0 first."""
        self.rank_in_group = rank
        self._of_rank_0 = of_rank_0 if of_rank_0 is not None else []
        self._num_received = 0

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        assert src == 0
        if self.rank_in_group == 0:
            self._of_rank_0.append(tensor.clone())
            return tensor
        tensor.copy_(self._of_rank_0[self._num_received])
        self._num_received += 1
        return tensor


def stand_in_manager(max_num_reqs: int, depth: int, max_total_logits: int) -> Any:
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
    max_num_reqs: int = 8,
    depth: int = 3,
    *,
    max_total_logits: int = 10_000,
    group: StandInGroup | None = None,
    num_draft_passes: int | None = None,
) -> PlannedVerification:
    """Make our manager over a stand-in of vLLM's."""
    return PlannedVerification(
        stand_in_manager(max_num_reqs, depth, max_total_logits),
        tp_group=group or StandInGroup(),
        num_draft_passes=num_draft_passes or depth,
        reader=DeviceReader(CPU),
    )


class StandInEvent:
    """A mark on a device whose clock the test moves."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._time_ms: float | None = None

    def record(self) -> None:
        self._time_ms = self._device.queued_ms

    def query(self) -> bool:
        return self._time_ms is not None and self._time_ms <= self._device.now_ms

    def elapsed_time(self, end: StandInEvent) -> float:
        assert self.query(), "read before the device got there"
        assert end.query(), "read before the device got there"
        assert self._time_ms is not None
        assert end._time_ms is not None
        return end._time_ms - self._time_ms


class StandInDevice:
    """A device with a queue: work is queued at once and done later."""

    def __init__(self) -> None:
        self.queued_ms = 0.0
        self.now_ms = 0.0

    def make_event(self) -> StandInEvent:
        return StandInEvent(self)

    def queue(self, duration_ms: float) -> None:
        self.queued_ms += duration_ms


def stand_in_config(**changes: Any) -> Any:
    """Stand in for the parts of vLLM's configuration that are looked at."""
    return SimpleNamespace(
        use_v2_model_runner=changes.get("v2", True),
        lora_config=changes.get("lora"),
        is_mm_encoder_only=False,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("pp", 1),
            enable_batch_sharded_sampling=changes.get("sharded", False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(
                has_full_cudagraphs=lambda: changes.get("graphs", True)
            )
        ),
        model_config=SimpleNamespace(return_sampling_mask=changes.get("mask", False)),
        aux_output_config=SimpleNamespace(enabled=changes.get("experts", False)),
        speculative_config=SimpleNamespace(
            method=changes.get("method", "eagle3"),
            use_local_argmax_reduction=changes.get("argmax", False),
            enable_adaptive_verification=False,
            attention_backend=changes.get("draft_backend"),
        ),
        attention_config=SimpleNamespace(
            backend=changes.get("backend"), backend_per_kind=changes.get("per_kind", {})
        ),
    )


def stand_in_backend(*, follows_device: bool | None) -> Any:
    """Stand in for a name of an attention back end; None cannot be imported."""

    def get_class():
        if follows_device is None:
            raise ImportError("not installed")
        return SimpleNamespace(
            supports_device_cpu_query_lens_mismatch=lambda: follows_device
        )

    return SimpleNamespace(name="X", get_class=get_class)
