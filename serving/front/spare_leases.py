"""Leases whose requests have ended, for the next ones on the same replicas.

To open a lease takes Serve some milliseconds and both processes a good part of what a
short request costs them; to hand the next request to a lease that is there takes one
message. So one is kept for a moment, in which whoever waits, or asks again, can have
it. Meanwhile it holds a slot of its replica, which Serve counts: of those a front takes
no more than its part, and none of a replica that drains.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.front.in_flight import InFlight, Lease
    from serving.front.token_link import TokenLink

KEEP_S: Final = 1.0
"""How long one is kept: longer than who asks again at once needs, and so short that a
drain does not notice."""


class SpareLeases:
    """Keeps leases by the links they are of, those used last first."""

    def __init__(
        self,
        is_leaving: Callable[[TokenLink], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep none.

        Args:
            is_leaving: Whether a replica takes nothing more.
            clock: Seconds.
        """
        self._is_leaving = is_leaving
        self._clock = clock
        self._kept: dict[TokenLink, list[tuple[float, Lease]]] = {}

    def end(self, link: TokenLink, ended: Sequence[InFlight]) -> None:
        """Tell a replica that requests have ended, and keep what leases may be kept."""
        spares = self._kept.setdefault(link, [])
        room = 0 if self._is_leaving(link) else link.load.num_spare - len(spares)
        kept, over = [], []
        for one in ended:
            lease = one.lease
            may_keep = lease is not None and lease.link is link and not one.was_alone
            if lease is None or not may_keep or room <= 0:
                over.append(one.engine_id)
                continue
            room -= 1
            lease.one = None
            kept.append(one.engine_id)
            spares.append((self._clock(), lease))
        if kept:
            link.keep(kept)
        if over:
            link.end(over)

    def take(self, link: TokenLink) -> Lease | None:
        """Return a lease of a link that waits for a request, None if there is none."""
        spares = self._kept.get(link, ())
        while spares:
            _, lease = spares.pop()
            if not lease.is_over:
                return lease
        return None

    def end_old(self) -> None:
        """End what nobody wanted; call it now and then."""
        old_s = self._clock() - KEEP_S
        for link, spares in self._kept.items():
            is_leaving = self._is_leaving(link)
            old = [one for since_s, one in spares if since_s <= old_s or is_leaving]
            if old:
                spares[:] = [one for one in spares if one[1] not in old]
                link.end(lease.request_id for lease in old)

    def lose(self, link: TokenLink) -> None:
        """Forget those of a link that is lost."""
        for _, lease in self._kept.pop(link, ()):
            lease.cancel()
