"""Places of fronts at one replica, and the calls that hold their requests there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving.replica.token_channel import TokenRelay


class LeaseLostError(Exception):
    """A lease ended before its request did."""


@dataclass(eq=False)
class Lease:
    """One call.

    Attributes:
        request_id: Of the request that it has, or had last.
        ended: Resolved when the call is to end, with its last word if it has one.
    """

    request_id: str
    ended: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, word: str = "") -> None:
        """End the call, if nothing has yet."""
        if not self.ended.done():
            self.ended.set_result(word)

    def fail(self, error: Exception) -> None:
        """End the call by an error, if nothing has ended it yet."""
        if not self.ended.done():
            self.ended.set_exception(error)


@dataclass(eq=False)
class Seat:
    """A front's place at this replica.

    Attributes:
        slot: Of the engine.
        linked: Whether its token channel stands.
        leases: Those of requests in the engine, by their ids.
        spares: Those kept for a next request, by the ids of the last ones.
        num_waiting: What waits at the front for a replica, this one's share.
        num_invited: Leases that wait for its token channel.
    """

    slot: int
    linked: asyncio.Event = field(default_factory=asyncio.Event)
    leases: dict[str, Lease] = field(default_factory=dict)
    spares: dict[str, Lease] = field(default_factory=dict)
    num_waiting: int = 0
    num_invited: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing can come in it."""
        holds = self.leases or self.spares or self.num_invited
        return not (self.linked.is_set() or holds)

    def find(self, request_id: str) -> Lease | None:
        """Return the lease that has this request, or had it last."""
        return self.leases.get(request_id) or self.spares.get(request_id)

    def lose_all(self) -> list[str]:
        """End all leases; return the ids of requests that are in the engine still."""
        lost = [name for name, one in self.leases.items() if not one.ended.done()]
        for lease in [*self.leases.values(), *self.spares.values()]:
            lease.fail(LeaseLostError("connection lost"))
        return lost


class Seats:
    """Gives each front a slot of the engine, until it is gone."""

    def __init__(self, relay: TokenRelay, num_slots: int) -> None:
        """Let nobody in yet.

        Args:
            relay: Forwards tokens by slot.
            num_slots: Of the engine, slot 0 included.
        """
        self._relay = relay
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._by_front: dict[bytes, Seat] = {}

    def __iter__(self) -> Iterator[Seat]:
        """Iterate over those that are taken."""
        return iter(self._by_front.values())

    @property
    def has_free(self) -> bool:
        """Whether another front may come."""
        return bool(self._free_slots)

    def find(self, front: bytes) -> Seat | None:
        """Return a front's, None if it has none."""
        return self._by_front.get(front)

    def take(self, front: bytes) -> Seat:
        """Return a front's; give it one if it has none.

        Raises:
            LeaseLostError: None is free.
        """
        seat = self._by_front.get(front)
        if seat is None:
            if not self._free_slots:
                raise LeaseLostError("more fronts than http.fronts.max allows for")
            seat = self._by_front[front] = Seat(self._free_slots.pop())
            self._relay.give_slot(seat.slot, front)
        return seat

    def free(self, front: bytes) -> None:
        """Take a front's away, if nothing can come in it."""
        seat = self._by_front.get(front)
        if seat is not None and seat.is_empty:
            del self._by_front[front]
            self._relay.take_slot(seat.slot)
            self._free_slots.append(seat.slot)
