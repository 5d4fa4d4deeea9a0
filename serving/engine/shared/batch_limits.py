"""Applies a batch plan through the limits vLLM's scheduler reads every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.batching import EngineLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from policies.decisions.batch_value import ClassLoad
    from policies.decisions.batching import BatchPlan
    from serving.engine.compat import Request, Scheduler

PRIOR_OUTPUT_TOKENS = 256
"""Output length expected before any request has ended, where `max_tokens` allows it: a
long default of `max_tokens` says nothing, and would let a new replica run a handful."""

PRIOR_WEIGHT = 4
"""Finished requests that the prior stands for: those that end first are short ones."""

OUTPUT_LENGTH_RATE = 0.05
"""Weight of a finished request in the running mean of output lengths, later on."""

MAX_MARKS = 32
"""Moments ahead at which the blocks then held are added up."""

_ENDED_BY_ITSELF = frozenset(
    {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}
)
"""vLLM's names of the ends that tell how long an output is. One that was aborted would
have been longer."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is running, in KV positions, `[num_reqs]` each, as plain numbers.

    Attributes:
        held: Positions held, with those of a prompt that is still being computed.
        growth: By which each is expected to grow.
        prompt_left: Part of `held` for which no block has been taken yet.
    """

    held: list[int]
    growth: list[int]
    prompt_left: list[int]


class BatchLimits:
    """Running sequences, prompt tokens and KV headroom of one scheduler.

    Sets only what vLLM offers as configuration anyway: `max_num_active_reqs`,
    `max_num_scheduled_tokens` and the KV cache manager's watermark, never above (or,
    for the watermark, below) what the engine was configured with. Who comes next is
    vLLM's decision, and one may always come: the next in the queue, if its prompt fits
    beside what the others will need, and in any case once nobody runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Remember the configured limits."""
        self._scheduler = scheduler
        self._max_active: int = scheduler.max_num_active_reqs
        self._max_tokens: int = scheduler.max_num_scheduled_tokens
        self._watermark: int = scheduler.kv_cache_manager.watermark_blocks
        self._mean_output_tokens = float(PRIOR_OUTPUT_TOKENS)
        self._num_outputs = PRIOR_WEIGHT
        self._running = _Batch([], [], [])

    def measure_load(
        self,
        latency_target_ms: float | None = None,
        classes: tuple[ClassLoad, ...] = (),
    ) -> EngineLoad:
        """Describe what is running as the coming step will find it.

        Targets and classes are as `EngineLoad` has them.
        """
        running = self._scheduler.running
        num_decode_tokens = num_computed = 0
        held, prompt_left = [], []
        for request in running:
            done, tokens = request.num_computed_tokens, request.num_tokens
            num_computed += done
            if request.is_prefill_chunk:
                # One that was preempted computes what it had emitted like a prompt.
                prompt_left.append(max(0, tokens - done))
                held.append(tokens)
            else:
                # Under asynchronous scheduling, tokens in flight count as computed.
                uncomputed = tokens + request.num_output_placeholders - done
                num_decode_tokens += uncomputed + len(request.spec_token_ids)
                prompt_left.append(0)
                # The latest token has no position of its own before the step.
                held.append(tokens - 1)
        growth = self._expect_growth(running)
        self._running = _Batch(held, growth, prompt_left)
        to_grow = [n + left for n, left in zip(growth, prompt_left, strict=True)]
        return EngineLoad(
            num_running=len(running),
            num_decode_tokens=num_decode_tokens,
            num_context_tokens=num_computed,
            tokens_to_grow=np.array(to_grow, dtype=np.int64),
            block_size=self._scheduler.block_size,
            latency_target_ms=latency_target_ms,
            classes=classes,
            num_waiting=len(self._scheduler.waiting),
        )

    def lift(self) -> None:
        """Restore the configured limits."""
        scheduler = self._scheduler
        scheduler.max_num_active_reqs = self._max_active
        scheduler.max_num_scheduled_tokens = self._max_tokens
        scheduler.kv_cache_manager.watermark_blocks = self._watermark

    def apply(self, plan: BatchPlan, load: EngineLoad) -> None:
        """Set the limits of the coming step."""
        scheduler = self._scheduler
        if scheduler.scheduler_config.long_prefill_token_threshold > 0:
            # vLLM gives tokens out in this order, and those that decode come after a
            # long prompt that was let in before them: it would take their share.
            scheduler.running.sort(key=_is_prefill_chunk)
        scheduler.max_num_scheduled_tokens = min(
            self._max_tokens, load.num_decode_tokens + plan.max_prefill_tokens
        )
        max_active = max(1, min(self._max_active, plan.max_running))
        headroom = max(self._watermark, plan.reserved_blocks)
        if scheduler.waiting:
            holding = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
            num_coming, num_blocks = self._admit(max_active - holding)
            max_active = min(max_active, holding + num_coming)
            headroom = max(headroom, num_blocks)
        scheduler.max_num_active_reqs = max_active
        scheduler.kv_cache_manager.watermark_blocks = headroom

    def note_finished(self, request: Request) -> None:
        """Learn how long outputs are."""
        if request.status.name not in _ENDED_BY_ITSELF:
            return
        self._num_outputs += 1
        rate = max(OUTPUT_LENGTH_RATE, 1.0 / self._num_outputs)
        self._mean_output_tokens += rate * (
            request.num_output_tokens - self._mean_output_tokens
        )

    def _admit(self, num_slots: int) -> tuple[int, int]:
        """Count the waiting requests that fit beside what runs, in vLLM's order.

        The first is left to vLLM, which knows how much of its prompt is cached; vLLM
        keeps the watermark free for it and all others. It looks at one request after
        the other, though, and what the first of them grows by is not taken yet when it
        looks at the second: so those after the first are counted here, as if nothing
        of their prompts were cached.

        Returns:
            Requests that may come, >= 1, and the blocks to keep free meanwhile.
        """
        scheduler, running = self._scheduler, self._running
        block_size = scheduler.block_size
        pool = scheduler.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        prompt_left = sum([-(-n // block_size) for n in running.prompt_left])
        held, growth = running.held.copy(), running.growth.copy()
        # What requests share is held until the last of them ends.
        num_held = sum([-(-n // block_size) for n in held]) - prompt_left
        num_used = pool.num_gpu_blocks - num_free
        own_share = min(1.0, num_used / max(num_held, 1))
        num_coming = num_prompt_tokens = num_prompt_blocks = headroom = 0
        num_to_grow = sum(growth)
        for request in scheduler.waiting:
            if num_coming > 0 and (
                num_coming >= num_slots
                or num_prompt_tokens >= scheduler.max_num_scheduled_tokens
            ):
                break
            tokens = request.num_tokens
            held.append(tokens)
            growth += self._expect_growth([request])
            num_prompt_tokens += tokens
            num_prompt_blocks += -(-tokens // block_size)
            num_to_grow += growth[-1]
            # More is never needed than all growth together.
            needed = prompt_left + len(held) + num_to_grow // block_size
            if num_prompt_blocks + needed > num_free:
                needed = prompt_left + foresee_growth(
                    np.array(held), np.array(growth), block_size, own_share
                )
            if num_coming > 0 and num_prompt_blocks + needed > num_free:
                break
            num_coming, headroom = num_coming + 1, needed
        return max(1, num_coming), headroom

    def _expect_growth(self, requests: Sequence[Request]) -> list[int]:
        """Return the positions by which each output is expected to grow."""
        scheduler, mean = self._scheduler, self._mean_output_tokens
        # A request past the mean may well go on for another block or so.
        least: int = scheduler.block_size
        # Drafts take up positions too, those to be verified and those to be drawn.
        margin: int = scheduler.num_lookahead_tokens + scheduler.num_spec_tokens
        return [
            int(min(max(mean - num_output, least), request.max_tokens - num_output))
            + margin
            for request in requests
            for num_output in (request.num_output_tokens,)
        ]


def _is_prefill_chunk(request: Request) -> bool:
    return bool(request.is_prefill_chunk)


def foresee_growth(
    held: NDArray[np.int64],
    growth: NDArray[np.int64],
    block_size: int,
    own_share: float = 1.0,
) -> int:
    """Return the blocks that requests will hold at most beyond those they hold now.

    All grow alike; who has grown as far as expected ends, and returns what it held.
    Requests that began together all need their last block at the same time; where
    some begin as others end, hardly more is ever needed than now.

    Args:
        held: `[num_reqs]`, positions that each holds.
        growth: `[num_reqs]`, >= 0, positions by which each is expected to grow.
        block_size: Positions per block.
        own_share: Part of its blocks that a request returns when it ends, 0-1; the
            others are shared.

    Returns:
        >= 0; 0 for no requests. With more different ends than `MAX_MARKS` an upper
        bound.

    Complexity: `MAX_MARKS` sums over the requests.

    Source: ours; the memory ahead instead of the present one, as in arXiv 2507.10150.
    """
    if held.size == 0:
        return 0
    marks = np.unique(growth)
    if marks.size > MAX_MARKS:
        picked = np.linspace(0, marks.size - 1, MAX_MARKS).round().astype(np.int64)
        marks = marks[picked]
    now = _count_blocks(held, block_size)
    then = _count_blocks(held + np.minimum(growth, marks[:, None]), block_size)
    # Whoever ends between two marks is counted as if it held on to the second.
    before = np.concatenate(([-1], marks[:-1]))
    gained = np.where(growth > before[:, None], then - now, -own_share * now)
    return int(np.ceil(gained.sum(axis=1).max(initial=0.0)))


def _count_blocks(
    num_positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    return -(-num_positions // block_size)
