"""What the coming step will carry of prompts that still wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.engine.compat import Scheduler

_READY = frozenset({"WAITING", "PREEMPTED"})
"""vLLM's names of the states from which a request can start at once."""


def count_coming_prompt_tokens(scheduler: Scheduler) -> int:
    """Estimate the tokens of waiting prompts that vLLM will let into the coming step.

    Drafts are chosen before vLLM looks at its queue, but what they cost depends on how
    many tokens they join. In vLLM's order, by the limits of the latest step, without
    what is cached; whether there are KV blocks for all of them is not looked at.

    Returns:
        >= 0. Changes nothing.
    """
    num_slots = (
        scheduler.max_num_active_reqs
        - len(scheduler.running)
        - scheduler.num_waiting_for_streaming_input
    )
    room: int = scheduler.max_num_scheduled_tokens - len(scheduler.running)
    manager = scheduler.kv_cache_manager
    num_tokens: int = 0
    for request in scheduler.waiting:
        if num_slots <= 0 or num_tokens >= room:
            break
        if request.status.name not in _READY:
            continue
        num_slots -= 1
        num_computed = request.num_computed_tokens
        # With events on, a look would be told to their readers.
        if num_computed == 0 and not manager.enable_kv_cache_events:
            num_computed = manager.get_computed_blocks(request)[1]
        num_tokens += request.num_tokens - num_computed
    return max(0, min(num_tokens, room))
