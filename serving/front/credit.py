"""How much a front may lease: what replicas have seats and KV blocks for.

Serve's router knows how many calls a replica has, not how many its engine can run. What
is leased beyond that waits inside an engine, where no replay, no class and no other
front's request can overtake it. So fronts lease by what every message of a replica says
of its engine, and keep the rest in a queue of their own. While several flows ask, some
seats are left to those that have few (`policies.decisions.places`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from policies.decisions.places import KeptSeats
from policies.decisions.refill import Refills

if TYPE_CHECKING:
    from policies.decisions.fairness import Turn
    from serving.front.in_flight import InFlight
    from serving.front.routing import Routing

MAX_UNSETTLED: Final = 8
"""Leases on their way through Serve at a time, where their order is lost."""


class Credit:
    """Says whether the next lease may be opened."""

    def __init__(self, routing: Routing) -> None:
        """Give credit by what may be leased at all.

        A replica that drains takes nothing more: seats that become free there are
        nobody's, and what is leased for them would wait in another's engine.
        """
        self._routing = routing
        self._refills = Refills()
        self._seats = KeptSeats()

    def has_share_left(self, turn: Turn) -> bool:
        """Note a new request; return whether its flow has less than its share."""
        self._seats.note(turn.flow, turn.weight, time.monotonic())
        num_seats = sum(
            link.offer.num_seats // link.state.num_fronts
            for link in self._routing.staying
        )
        is_shared = self._seats.is_shared()
        return is_shared and self._seats.has_share_left(turn.flow, num_seats)

    def count_free(self, one: InFlight) -> int:
        """Return how many seats there are for such a request; may be negative."""
        links = self._routing.takers
        free = sum(link.load.num_free_seats for link in links)
        if one.standing.hurries or one.moves.num_replays or not self._seats.is_shared():
            return free
        return free - sum(link.load.num_kept_seats for link in links)

    def allows(self, one: InFlight, num_unsettled: int) -> bool:
        """Return whether this request's lease may be opened.

        While a replica that runs is not connected, one lease at a time may look for it
        whatever is free; with none connected one wakes a deployment that has scaled to
        zero. But only when routing would send it there: Serve goes on listing replicas
        that have died or take nothing, and whatever else is opened goes to the others.

        Args:
            one: The request.
            num_unsettled: Leases on their way to a replica.
        """
        links = self._routing.takers
        # Nor may a front starve: by what others hold, or by what was said last of an
        # engine that says nothing new.
        has_none = not any(link.load.num_held for link in links)
        if not num_unsettled and (has_none or self._routing.find_new()):
            return True
        if num_unsettled >= min(self.count_free(one), MAX_UNSETTLED):
            return False
        free = sum(link.state.num_free_kv_tokens for link in links)
        return not one.emitted or self._refills.have_room(one.num_tokens, free)

    def note_opened(self, one: InFlight) -> None:
        """Remember a seat, and what a replay takes before its blocks show."""
        self.take_seat(one)
        if one.emitted:
            self._refills.note_opened(one, one.num_tokens)

    def take_seat(self, one: InFlight) -> None:
        """Count a seat as its flow's, if that has not been done."""
        standing = one.standing
        if not standing.has_seat:
            turn = standing.turn
            self._seats.take(turn.flow, turn.weight, time.monotonic())
            standing.has_seat = True

    def note_left(self, one: InFlight) -> None:
        """Note that a request has no seat any more, if it had one."""
        if one.standing.has_seat:
            self._seats.free(one.standing.turn.flow)
            one.standing.has_seat = False

    def note_begun(self, one: InFlight) -> None:
        """Forget it: the request has put out a token, or is not there any more."""
        self._refills.note_begun(one)
