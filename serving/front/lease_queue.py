"""Whose lease is opened next.

Serve's own queue is first come first served and knows nothing of replays or classes. So
a lease is opened when there is a place for it; until then its request waits here:
replays first, then by priority, then by arrival.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_WAIT_S: Final = 30.0
"""Longest wait before a request may overtake more urgent ones, as in the engines."""

OVERDUE_SHARE: Final = 4
"""One lease in so many goes to what is overdue. With more, a backlog of what is not
urgent would, once it is old, shut out all that is."""


class LeaseQueue(Generic[T]):
    """Opens leases in order, as far as there are places."""

    def __init__(
        self,
        open_lease: Callable[[T], None],
        may_open: Callable[[T, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold nothing yet.

        Args:
            open_lease: Starts to open one; `settle` is called once it has got its
                place, or will get none.
            may_open: Whether the lease that is next may be opened, by how many are open
                without having been settled.
            clock: Seconds.
        """
        self._open_lease = open_lease
        self._may_open = may_open
        self._clock = clock
        # Of each that waits, by arrival: since when, and its place in the order.
        self._waiting: dict[int, tuple[float, tuple[bool, int], T]] = {}
        self._order: list[tuple[tuple[bool, int], int]] = []
        self._arrivals = itertools.count()
        self._num_unsettled = 0
        self._num_opened = 0

    def __len__(self) -> int:
        """Count what waits here."""
        return len(self._waiting)

    def add(self, item: T, *, first: bool = False, priority: int = 0) -> None:
        """Let something wait its turn.

        Args:
            item: What to open a lease for.
            first: Before all that wait, but behind earlier ones that were first.
            priority: Smaller ones go before.
        """
        arrival, place = next(self._arrivals), (not first, priority)
        self._waiting[arrival] = (self._clock(), place, item)
        heapq.heappush(self._order, (place, arrival))
        self.open_more()

    def settle(self) -> None:
        """Note that a lease has got its replica, or will get none."""
        self._num_unsettled -= 1
        self.open_more()

    def open_more(self) -> None:
        """Open what leases may be opened now."""
        while self._waiting:
            arrival = self._find_next()
            *_, item = self._waiting[arrival]
            if not self._may_open(item, self._num_unsettled):
                return
            del self._waiting[arrival]
            self._num_unsettled += 1
            self._num_opened += 1
            self._open_lease(item)

    def _find_next(self) -> int:
        """Return the arrival of what is next."""
        while self._order[0][1] not in self._waiting:
            # It was overdue, and has had its turn.
            heapq.heappop(self._order)
        (goes_behind_replays, _), arrival = self._order[0]
        if goes_behind_replays and self._num_opened % OVERDUE_SHARE == 0:
            oldest = next(iter(self._waiting))
            if self._clock() - self._waiting[oldest][0] > MAX_WAIT_S:
                return oldest
        return arrival
