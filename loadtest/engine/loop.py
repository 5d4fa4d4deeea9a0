"""The loop that drives an engine: requests wait for a place, or for their time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REQUESTS_TO_BE_STEADY = 3
"""For each one in flight: fewer may have no steady part."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step brought for a request: its number, new tokens, whether it ended."""

    index: int
    token_ids: Sequence[int]
    finished: bool


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """What happened, in seconds of the loop's clock.

    Attributes:
        began_s: When the first requests were sent.
        steps: When each step ended, and what it brought, in order.
        marks: When the steady part began (`start`) and ended (`end`), and when
            conditions changed (`switch`), if they did.
    """

    began_s: float
    steps: Sequence[tuple[float, list[Delivery]]]
    marks: dict[str, float]


def run_loop(
    add: Callable[[int], None],
    step: Callable[[], list[Delivery]],
    num_requests: int,
    concurrency: int,
    *,
    on_mark: Callable[[str], None] = lambda _: None,
    switch_at: int | None = None,
    due_s: Sequence[float] = (),
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> LoopRecord:
    """Run requests with exactly `concurrency` of them in flight.

    If they are due at times, s from the first moment on and rising, fewer may be: one
    that comes during a step is added before the next, and without any the loop waits.

    The steady part begins when all of the first ones have begun to reply, and ends when
    a place stays empty. Between the two every arm computes the same prompts, all but
    the first `concurrency`. Were the beginning a count of finished requests, a prompt
    more or less would fall behind it, by how many end in the same step: a tenth of a
    short cell's time.

    `on_mark` is called with `start`, `switch` and `end` when they are reached; `switch`
    stands before the admission of request `switch_at`.
    """
    steps: list[tuple[float, list[Delivery]]] = []
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = now_s
        on_mark(name)

    def may_add() -> bool:
        has_place = num_added < num_requests and num_added - num_finished < concurrency
        return has_place and (not due_s or due_s[num_added] <= clock() - began_s)

    num_added = num_finished = 0
    silent = set(range(concurrency))
    began_s = clock()
    while num_finished < num_requests:
        while may_add():
            if num_added == switch_at:
                mark("switch")
            add(num_added)
            num_added += 1
        if num_added == num_finished:
            wait(max(0.0, due_s[num_added] - (clock() - began_s)))
            continue
        deliveries = step()
        now_s = clock()
        steps.append((now_s, deliveries))
        num_finished += sum(delivery.finished for delivery in deliveries)
        silent.difference_update(one.index for one in deliveries if one.token_ids)
        if "start" not in marks and not silent:
            mark("start")
        elif "end" not in marks and num_requests - num_finished < concurrency:
            mark("end")
    return LoopRecord(began_s, steps, marks)
