"""Whose lease is opened next.

Serve's own queue is first come first served and knows nothing of replays or classes. So
a lease is opened when there is a place for it; until then its request waits here, in
the order of `policies.decisions.fairness`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from policies.decisions.fairness import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.decisions.fairness import Turn

T = TypeVar("T")

MAX_WAIT_S: Final = 30.0
"""Longest wait before a request may overtake more urgent ones, as in the engines."""


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
        self._waiting: FairQueue[T] = FairQueue(MAX_WAIT_S)
        self._num_unsettled = 0

    def __len__(self) -> int:
        """Count what waits here."""
        return len(self._waiting)

    def add(self, item: T, turn: Turn, *, first: bool = False) -> None:
        """Let something wait its turn.

        Args:
            item: What to open a lease for.
            turn: What it takes, and from whose share.
            first: Before all that wait, but behind earlier ones that were first.
        """
        self._waiting.add(item, turn, self._clock(), first=first)
        self.open_more()

    def remove(self, item: T) -> None:
        """Let something wait no more; what it kept waiting needs `open_more`."""
        self._waiting.remove(item)

    def work_ahead_ms(self, turn: Turn) -> float:
        """Predict the work before what came now, ms of one replica's time."""
        return self._waiting.work_ahead_ms(turn)

    def is_behind(self, turn: Turn) -> bool:
        """Return whether what is more urgent waits, or more of a request's own flow."""
        return self._waiting.is_behind(turn)

    def count(self) -> dict[str, int]:
        """Count what waits here by flow."""
        return self._waiting.count()

    def settle(self) -> None:
        """Note that a lease has got its replica, or will get none."""
        self._num_unsettled -= 1
        self.open_more()

    def open_more(self) -> None:
        """Open what leases may be opened now."""
        while self._waiting:
            now_s = self._clock()
            item = self._waiting.peek(now_s)
            if not self._may_open(item, self._num_unsettled):
                return
            self._waiting.pop(now_s)
            self._num_unsettled += 1
            self._open_lease(item)
