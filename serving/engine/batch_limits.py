"""Applies a batch plan through the limits vLLM's scheduler reads every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.admission import EngineLoad

if TYPE_CHECKING:
    from policies.admission import BatchPlan
    from serving.engine.compat import Request, Scheduler

OUTPUT_LENGTH_RATE = 0.05
"""Weight of a finished request in the running mean of output lengths."""


class BatchLimits:
    """Running sequences, prompt tokens and KV headroom of one scheduler.

    Sets only what vLLM offers as configuration anyway: `max_num_active_reqs`,
    `max_num_scheduled_tokens` and the KV cache manager's watermark, never above (or,
    for the watermark, below) what the engine was configured with.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Remember the configured limits."""
        self._scheduler = scheduler
        self._max_active: int = scheduler.max_num_active_reqs
        self._max_tokens: int = scheduler.max_num_scheduled_tokens
        self._watermark: int = scheduler.kv_cache_manager.watermark_blocks
        self._mean_output_tokens = 0.0

    def is_needed(self) -> bool:
        """Tell whether there is anything to limit: a queue, or a prompt under way."""
        scheduler = self._scheduler
        return bool(scheduler.waiting) or any(
            request.is_prefill_chunk for request in scheduler.running
        )

    def measure_load(self) -> EngineLoad:
        """Describe what is running as the coming step will find it."""
        running = self._scheduler.running
        # Under asynchronous scheduling, tokens still in flight count as computed.
        uncomputed = [
            request.num_tokens_with_spec + request.num_output_placeholders
            for request in running
        ]
        computed = [request.num_computed_tokens for request in running]
        decoding = [
            tokens - done
            for request, tokens, done in zip(running, uncomputed, computed, strict=True)
            if not request.is_prefill_chunk
        ]
        return EngineLoad(
            num_running=len(running),
            num_decode_tokens=sum(decoding),
            num_context_tokens=sum(computed),
            tokens_to_grow=np.array(
                [self._expect_growth(request) for request in running], dtype=np.int64
            ),
            block_size=self._scheduler.block_size,
        )

    def apply(self, plan: BatchPlan | None, num_decode_tokens: int) -> None:
        """Set the limits of the coming step; None restores the configured ones."""
        scheduler = self._scheduler
        if plan is None:
            scheduler.max_num_active_reqs = self._max_active
            scheduler.max_num_scheduled_tokens = self._max_tokens
            scheduler.kv_cache_manager.watermark_blocks = self._watermark
            return
        scheduler.max_num_active_reqs = max(1, min(self._max_active, plan.max_running))
        scheduler.max_num_scheduled_tokens = min(
            self._max_tokens, num_decode_tokens + plan.max_prefill_tokens
        )
        scheduler.kv_cache_manager.watermark_blocks = max(
            self._watermark, plan.reserved_blocks
        )

    def note_finished(self, request: Request) -> None:
        """Learn how long outputs are."""
        length = float(request.num_output_tokens)
        if self._mean_output_tokens == 0.0:
            self._mean_output_tokens = length
        self._mean_output_tokens += OUTPUT_LENGTH_RATE * (
            length - self._mean_output_tokens
        )

    def _expect_growth(self, request: Request) -> int:
        most = int(request.max_tokens - request.num_output_tokens)
        if self._mean_output_tokens == 0.0:
            return max(0, most)
        # A request past the mean may well go on for another block or so.
        expected = self._mean_output_tokens - request.num_output_tokens
        return max(0, min(most, int(max(expected, self._scheduler.block_size))))
