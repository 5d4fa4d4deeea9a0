"""Lets requests that have waited for long overtake more urgent ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.compat import Request, Scheduler
    from serving.engine.shared.counters import SpeculationCounters
    from serving.engine.shared.request_classes import RequestClasses

MAX_WAIT_S = 30.0
"""Longest wait in the queue before a request becomes as urgent as any."""

LOOK_PERIOD_S = 1.0
"""Time between two looks at the queue."""

MAX_AGED_SHARE = 0.25
"""Most of an engine's requests that may have become urgent by waiting. Without a limit
a backlog of what is not urgent would, once it is old, shut out all that is."""


class Ageing:
    """Raises the priority of requests that wait too long, where there are priorities.

    vLLM always takes the most urgent request first, and takes KV blocks back from the
    least urgent: sustained urgent load would let all others wait for ever. Whoever has
    waited longer than `MAX_WAIT_S` (since it came, or was preempted) gets the smallest
    priority there is, and goes before the others of it, which came later. A request's
    class, by which its drafts are weighed, stays the same. No token has a part in it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        classes: RequestClasses,
        counters: SpeculationCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch over a scheduler's queue."""
        config = scheduler.scheduler_config
        self._scheduler = scheduler
        self._classes = classes
        self._counters = counters
        self._clock = clock
        self._has_priorities: bool = config.policy == "priority"
        self._max_aged = max(1, int(MAX_AGED_SHARE * config.max_num_seqs))
        self._next_look_s = 0.0
        self._waiting_since_s: dict[str, float] = {}
        self._aged: set[str] = set()

    def look(self) -> None:
        """Raise those that have waited too long; most calls return at once."""
        if not self._has_priorities:
            return
        now_s = self._clock()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_PERIOD_S
        scheduler = self._scheduler
        waiting: list[Request] = list(scheduler.waiting)
        self._waiting_since_s = {
            request.request_id: self._waiting_since_s.get(request.request_id, now_s)
            for request in waiting
        }
        urgent = min((one.priority for one in waiting + scheduler.running), default=0)
        overdue = [
            request
            for request in waiting
            if request.priority > urgent
            and now_s - self._waiting_since_s[request.request_id] >= MAX_WAIT_S
        ]
        if overdue:
            self._raise_to(urgent, overdue)

    def _raise_to(self, priority: int, overdue: list[Request]) -> None:
        """Give as many as may the priority, those that came first before others."""
        scheduler = self._scheduler
        self._aged &= scheduler.requests.keys()
        # Some may have been raised before, to what was the smallest then.
        again = [one for one in overdue if one.request_id in self._aged]
        others = [one for one in overdue if one.request_id not in self._aged]
        others.sort(key=lambda request: request.arrival_time)
        newly = others[: self._max_aged - len(self._aged)]
        for request in again + newly:
            # Found by its own priority, and kept from then on. Before anybody leaves
            # the queue: a fault half-way would lose those that are out of it.
            self._classes.of(request)
        scheduler.waiting.remove_requests({*again, *newly})
        for request in again + newly:
            request.priority = priority
            scheduler.waiting.add_request(request)
        self._aged.update(request.request_id for request in newly)
        self._counters.num_aged_requests += len(newly)
