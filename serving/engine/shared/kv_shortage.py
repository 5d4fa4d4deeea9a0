"""Shortens drafts before vLLM would preempt a request for the blocks they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.engine.compat import Request, Scheduler


@dataclass(frozen=True, slots=True)
class _Cut:
    """Drafts to keep of a request, and the blocks it then does not need."""

    request: Request
    num_kept: int
    num_saved: int


def trim_to_free_blocks(scheduler: Scheduler) -> int:
    """Keep the drafts of the coming step to the KV blocks that are free.

    Where the running requests would need more blocks than there are, drafts that begin
    a block are cut short of it, if that is enough; else nothing is cut, because
    somebody will be preempted in any case, whose blocks then serve all drafts. The
    request that vLLM would preempt first, the last one, loses its drafts first.

    Lossless: whether a draft is cut depends on lengths of other requests and on its own
    position, never on what was drawn for it or behind it. Blocks of several kinds, or
    smaller than a draft, would add the length of the whole draft, so drafts are left
    alone there.

    Returns:
        Draft tokens cut.

    Complexity: constant while blocks are plenty, else linear in the running requests.
    """
    manager = scheduler.kv_cache_manager
    num_free = manager.block_pool.get_num_free_blocks()
    num_running = len(scheduler.running)
    most_positions = (
        scheduler.max_num_scheduled_tokens
        + num_running * scheduler.num_lookahead_tokens
    )
    # Full blocks of new positions, and one that each request begins.
    if num_free >= most_positions // scheduler.block_size + num_running:
        return 0
    if len(manager.coordinator.single_type_managers) > 1:
        return 0
    [blocks] = manager.coordinator.single_type_managers
    if scheduler.num_spec_tokens > blocks.block_size:
        return 0
    num_needed, cuts = _find_cuts(scheduler, blocks)
    num_short = num_needed - num_free
    if num_short > sum(cut.num_saved for cut in cuts):
        return 0
    num_cut = 0
    while num_short > 0:
        cut = cuts.pop()
        drafts = cut.request.spec_token_ids
        num_cut += len(drafts) - cut.num_kept
        # A new list: under asynchronous scheduling vLLM shares one between requests.
        cut.request.spec_token_ids = drafts[: cut.num_kept]
        num_short -= cut.num_saved
    return num_cut


def _find_cuts(scheduler: Scheduler, blocks: Any) -> tuple[int, list[_Cut]]:
    """Return the blocks that all running requests need, and where drafts need some."""
    num_needed, cuts = 0, []
    token_budget = scheduler.max_num_scheduled_tokens
    for request in scheduler.running:
        num_drafts = len(request.spec_token_ids)
        num_wanted = (
            request.num_tokens
            + request.num_output_placeholders
            + num_drafts
            - request.num_computed_tokens
        )
        num_tokens = min(num_wanted, token_budget)
        token_budget -= num_tokens
        start = request.num_computed_tokens + scheduler.num_lookahead_tokens
        num_held = len(blocks.req_to_blocks.get(request.request_id, ()))
        with_drafts, without = (
            _count_blocks(min(start + n, scheduler.max_model_len), blocks.block_size)
            for n in (num_tokens, num_tokens - num_drafts)
        )
        num_needed += max(0, with_drafts - num_held)
        num_saved = with_drafts - max(without, num_held)
        if num_saved > 0 and num_tokens == num_wanted:
            room = max(without, num_held) * blocks.block_size - start
            num_kept = room - (num_tokens - num_drafts)
            cuts.append(_Cut(request, num_kept, num_saved))
    return num_needed, cuts


def _count_blocks(num_positions: int, block_size: int) -> int:
    return -(-num_positions // block_size)
