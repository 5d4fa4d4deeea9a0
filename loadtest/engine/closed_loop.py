"""A closed loop: as many requests in flight as asked, each refilled as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step brought for one request.

    Attributes:
        index: Number of the request.
        token_ids: Its new tokens.
        finished: Whether it has ended.
    """

    index: int
    token_ids: Sequence[int]
    finished: bool


class Engine(Protocol):
    """What the loop drives."""

    def add(self, index: int) -> None:
        """Admit a request."""
        ...

    def step(self) -> list[Delivery]:
        """Run one engine step."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One finished engine step."""

    end_s: float
    deliveries: Sequence[Delivery]


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """What happened, in seconds of the loop's clock.

    Attributes:
        steps: All steps in order.
        start_s: When the steady part began.
        end_s: When it ended.
        switch_s: When conditions changed; None if they did not.
    """

    steps: Sequence[Step]
    start_s: float
    end_s: float
    switch_s: float | None


def min_requests(concurrency: int) -> int:
    """Return the fewest requests with which a loop has a steady part."""
    return 3 * concurrency


def run_closed_loop(
    engine: Engine,
    num_requests: int,
    concurrency: int,
    *,
    on_mark: Callable[[str], None],
    switch_at: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopRecord:
    """Run requests with exactly `concurrency` of them in flight.

    The steady part begins when all of the first ones have begun to reply, and ends when
    a place stays empty. Between the two every arm computes the same prompts, all but
    the first `concurrency`. Were the beginning a count of finished requests, a prompt
    more or less would fall behind it, by how many end in the same step: a tenth of a
    short cell's time.

    Args:
        engine: Takes requests by number.
        num_requests: How many there are.
        concurrency: How many are in flight.
        on_mark: Called with `start`, `switch` and `end` when they are reached.
        switch_at: The request before whose admission `switch` is marked.
        clock: Seconds.

    Returns:
        The record.

    Raises:
        ValueError: If there are too few requests for a steady part.
    """
    if num_requests < min_requests(concurrency):
        raise ValueError(
            f"{num_requests} requests are too few for a steady part with {concurrency} "
            f"in flight: ask for at least {min_requests(concurrency)}"
        )
    steps: list[Step] = []
    marks: dict[str, float] = {}

    def mark(name: str, now_s: float) -> None:
        marks[name] = now_s
        on_mark(name)

    num_added = num_finished = 0
    silent = set(range(concurrency))
    now_s = clock()
    while num_finished < num_requests:
        while num_added < num_requests and num_added - num_finished < concurrency:
            if num_added == switch_at:
                mark("switch", now_s)
            engine.add(num_added)
            num_added += 1
        deliveries = engine.step()
        now_s = clock()
        steps.append(Step(now_s, deliveries))
        num_finished += sum(delivery.finished for delivery in deliveries)
        silent.difference_update(one.index for one in deliveries if one.token_ids)
        if "start" not in marks and not silent:
            mark("start", now_s)
        elif "end" not in marks and num_requests - num_finished < concurrency:
            mark("end", now_s)
    return LoopRecord(steps, marks["start"], marks["end"], marks.get("switch"))
