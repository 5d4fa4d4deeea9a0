"""Whose lease is opened next.

Serve's own queue is first come first served and knows nothing of replays. So only a few
leases wait for a replica there; all others wait here, replays first.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_UNPLACED: Final = 8
"""Leases that may wait for a replica inside Serve, where their order is lost. One at
least, which wakes a deployment that has scaled to zero."""


class LeaseQueue(Generic[T]):
    """Opens leases in order, a few at a time."""

    def __init__(
        self, open_lease: Callable[[T], None], max_unplaced: int = MAX_UNPLACED
    ) -> None:
        """Hold nothing yet.

        Args:
            open_lease: Starts to open one; `place` is called once that is settled.
            max_unplaced: Leases that may be open without having been placed.
        """
        self._open_lease = open_lease
        self._max_unplaced = max_unplaced
        self._waiting: list[tuple[int, int, T]] = []
        self._arrivals = itertools.count()
        self._num_unplaced = 0

    def __len__(self) -> int:
        """Count the leases that have not been placed."""
        return len(self._waiting) + self._num_unplaced

    def add(self, item: T, *, first: bool = False) -> None:
        """Let something wait its turn.

        Args:
            item: What to open a lease for.
            first: Before all that wait, but behind earlier ones that were first.
        """
        heapq.heappush(self._waiting, (0 if first else 1, next(self._arrivals), item))
        self._open_more()

    def place(self) -> None:
        """Note that a lease has got its replica, or will get none."""
        self._num_unplaced -= 1
        self._open_more()

    def _open_more(self) -> None:
        while self._waiting and self._num_unplaced < self._max_unplaced:
            self._num_unplaced += 1
            self._open_lease(heapq.heappop(self._waiting)[-1])
