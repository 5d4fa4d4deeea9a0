"""An open loop: requests come when they come, whether others are answered or not."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .closed_loop import Delivery, LoopRecord


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests and when they come.

    Attributes:
        prompts: Token ids of each request, in the order in which they come.
        due_s: When each comes, s from the first moment on, rising.
        max_tokens: The longest reply of each.
        priorities: vLLM's, of each, if they have any.
    """

    prompts: tuple[tuple[int, ...], ...]
    due_s: tuple[float, ...]
    max_tokens: tuple[int, ...]
    eos_token_id: int
    priorities: tuple[int, ...] = ()
    temperature: float = 0.0


def run_open_loop(
    add: Callable[[int], None],
    step: Callable[[], list[Delivery]],
    due_s: Sequence[float],
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> LoopRecord:
    """Run requests until the last one is answered.

    One that comes during a step is added before the next; without any the loop waits.
    """
    steps: list[tuple[float, list[Delivery]]] = []
    num_added = num_finished = 0
    began_s = clock()
    while num_finished < len(due_s):
        now_s = clock() - began_s
        while num_added < len(due_s) and due_s[num_added] <= now_s:
            add(num_added)
            num_added += 1
        if num_added == num_finished:
            wait(due_s[num_added] - now_s)
            continue
        deliveries = step()
        steps.append((clock(), deliveries))
        num_finished += sum(delivery.finished for delivery in deliveries)
    return LoopRecord(began_s, steps, {})
