"""What each flow may have: places in a front, and seats in its engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

KEPT_SHARE: Final = 16
"""One in so many of an engine's seats is kept; engines with fewer keep none."""

LATELY_S: Final = 60.0
"""For so long after a flow's latest request something is kept for the next one."""


class Places:
    """How many requests each flow may have, so that none takes all places there are.

    Half of them are kept for flows that came lately, alike; the other half are
    anybody's. One flow alone may have them all; where there are too many to keep one
    for each, none may have more than half.
    """

    def __init__(self, num_flows: int) -> None:
        """Count nothing yet.

        Args:
            num_flows: That places are kept for though they never came, >= 1.
        """
        self._least_flows = num_flows
        self._seen_s: dict[str, float] = {}
        self._taken: dict[str, int] = {}
        self._looked_s = -math.inf

    def note_flow(self, flow: str, now_s: float) -> None:
        """Keep places for a flow from now on, for a while."""
        self._seen_s[flow] = now_s
        if now_s - self._looked_s > 1.0:
            self._looked_s = now_s
            for name, seen_s in list(self._seen_s.items()):
                if name not in self._taken and seen_s < now_s - LATELY_S:
                    del self._seen_s[name]

    def has_room(self, flow: str, limit: int) -> bool:
        """Return whether a flow may have one more.

        Args:
            flow: Whose the next one is.
            limit: Places there are now.
        """
        num_flows = max(self._least_flows, len(self._seen_s))
        kept = limit // (2 * num_flows)
        own = self._taken.get(flow, 0)
        if own < kept:
            return self.num_taken < limit
        if not kept and num_flows > 1 and own >= max(1, limit - limit // 2):
            return False
        borrowed = sum(max(0, count - kept) for count in self._taken.values())
        return borrowed < limit - kept * num_flows

    @property
    def num_taken(self) -> int:
        """Places that are taken."""
        return sum(self._taken.values())

    def take(self, flow: str) -> None:
        """Note one more."""
        self._taken[flow] = self._taken.get(flow, 0) + 1

    def free(self, flow: str) -> None:
        """Note one less."""
        self._taken[flow] -= 1
        if not self._taken[flow]:
            del self._taken[flow]


@dataclass(slots=True)
class _Holder:
    """One flow, as far as seats go."""

    weight: float
    seen_s: float
    num_seats: int = 0


class KeptSeats:
    """Seats kept free for flows that hold less than their share of all there are.

    Turns alone leave a flow that asks for little to wait until somebody else's request
    ends. A flow with less than its share hurries: its request goes before all turns,
    into a seat that those who have their share leave free. While only one flow asks,
    nothing is kept.
    """

    def __init__(self) -> None:
        """Know no flow yet."""
        self._flows: dict[str, _Holder] = {}
        self._weight = 0.0
        self._looked_s = -math.inf

    def note(self, flow: str, weight: float, now_s: float) -> None:
        """Note that a request of a flow came."""
        holder = self._flows.get(flow)
        if holder is None:
            holder = self._flows[flow] = _Holder(weight, now_s)
            self._weight += weight
        holder.seen_s = now_s
        if now_s - self._looked_s > 1.0:
            self._looked_s = now_s
            self._forget(now_s - LATELY_S)

    def take(self, flow: str, weight: float, now_s: float) -> None:
        """Note that a flow holds one seat more, or is about to."""
        self.note(flow, weight, now_s)
        self._flows[flow].num_seats += 1

    def free(self, flow: str) -> None:
        """Note that it holds one less."""
        self._flows[flow].num_seats -= 1

    def has_share_left(self, flow: str, num_seats: int) -> bool:
        """Return whether a noted flow holds less than its share of so many seats."""
        holder = self._flows[flow]
        return holder.num_seats < num_seats * holder.weight / self._weight

    def is_shared(self) -> bool:
        """Return whether seats are kept: several flows asked lately."""
        return len(self._flows) > 1

    def _forget(self, since_s: float) -> None:
        for name, holder in list(self._flows.items()):
            if not holder.num_seats and holder.seen_s < since_s:
                del self._flows[name]
        self._weight = sum(holder.weight for holder in self._flows.values())


def count_kept(num_seats: int) -> int:
    """Return how many of an engine's seats are kept."""
    return num_seats // KEPT_SHARE
