"""What becomes of a request whose replica is gone, or would not have it."""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from serving.engine.compat import GracefulHTTPError
from serving.front import failures
from serving.front.condemned import CONDEMNED, Condemned
from serving.front.request_log import log_end
from serving.replica.leases import BUSY, OTHER_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.front.admission import Admission
    from serving.front.credit import Credit
    from serving.front.in_flight import InFlight, InFlightRequests
    from serving.front.lease_queue import LeaseQueue
    from serving.front.routing import Routing

logger = logging.getLogger("ray.serve")

FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 1.0

MAX_STRANGERS: Final = 12
"""Engines in a row that cannot go on with a request, where no other is known: in nine
seconds or so each that runs was asked."""

MAX_REPLAYS: Final = 20
"""Of one request. A fault of ours that its tokens trigger must not go on for ever."""


class Failover:
    """Lets another engine go on with a request, or ends it with an error.

    Attributes:
        on_replay: Told why, and of how many tokens, when a request moves.
        on_failure: Told the id of a request that cannot be served, and why.
    """

    def __init__(
        self,
        requests: InFlightRequests,
        queue: LeaseQueue[InFlight],
        credit: Credit,
        routing: Routing,
        admission: Admission,
    ) -> None:
        """Condemn nobody yet.

        Args:
            requests: All of the front.
            queue: Those that wait for a lease.
            credit: How much may be leased.
            routing: From whom.
            admission: What is let in.
        """
        self.on_replay: Callable[[str, int], None] = lambda _reason, _tokens: None
        self.on_failure: Callable[[str, Exception], None] = failures.log_unheard
        self._requests, self._queue = requests, queue
        self._credit, self._routing, self._admission = credit, routing, admission
        self._condemned = Condemned()

    def check(self, one: InFlight) -> None:
        """Refuse what killed its engine lately.

        Raises:
            GracefulHTTPError: It did.
        """
        if self._condemned.holds(one):
            raise GracefulHTTPError(CONDEMNED, HTTPStatus.BAD_REQUEST)

    def enqueue(self, one: InFlight) -> None:
        """Let a request wait for a lease."""
        # It may have been given up while it waited to look on.
        if one in self._requests:
            first = one.moves.num_replays > 0 or one.standing.hurries
            self._queue.add(one, one.standing.turn, first=first)

    def forget(self, request_id: str) -> InFlight | None:
        """Let a request be none of the front's; return it if it was."""
        one = self._requests.pop(request_id)
        if one is not None:
            self._credit.note_left(one)
            self._admission.note_gone(one, self._requests)
        return one

    def give_up(self, one: InFlight) -> None:
        """End whatever a request holds at a replica, or its wait for one."""
        self._queue.remove(one)
        if one.link is not None and not one.link.is_lost:
            one.link.abort([one.engine_id])
        elif one.lease is not None:
            one.lease.cancel()
        one.place(None)
        self.note_begun(one)

    def note_begun(self, one: InFlight) -> None:
        """Note that an engine has begun with a request, or will not any more."""
        self._credit.note_begun(one)
        self._routing.note_begun(one)

    def fail(self, one: InFlight, message: str, status: HTTPStatus) -> None:
        """End a request with an error."""
        log_end(one, f"error {status.value}")
        if self.forget(one.request_id) is not None:
            self.give_up(one)
        self.on_failure(one.request_id, GracefulHTTPError(message, status))

    def move(self, one: InFlight, reason: str) -> None:
        """Let another engine go on with a request."""
        # One that is busy has not taken what it was handed.
        was_placed, was_alone = one.link is not None and reason != BUSY, one.was_alone
        # Where the drain of a replica took too long, Serve ends it: no request did.
        is_leaving = one.link is not None and self._routing.is_leaving(one.link)
        self._requests.pop(one.request_id)
        self._credit.note_left(one)
        self.give_up(one)
        # One that was dead before it took the request did not die of it.
        if was_placed and failures.is_death(reason, is_leaving=is_leaving):
            one.moves.num_deaths += 1
            if was_alone:
                self._condemn(one)
                return
        one.moves.attempt += 1
        one.lease = None
        self._requests.add(one)
        if was_placed:
            self._replay(one, reason)
        else:
            self._look_on(one, reason)

    def _replay(self, one: InFlight, reason: str) -> None:
        """Let a request that a replica had go on elsewhere."""
        one.moves.num_replays += 1
        if one.moves.num_replays > MAX_REPLAYS:
            self.fail(one, failures.INTERRUPTED, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        shown = reason if reason in failures.REASONS else "failure"
        self.on_replay(shown, one.num_tokens)
        one.since_s = time.monotonic()
        self.enqueue(one)

    def _look_on(self, one: InFlight, reason: str) -> None:
        """Let a request that a replica would not have ask others, a little later."""
        if (
            reason == OTHER_MODEL
            and one.moves.num_refusals >= MAX_STRANGERS
            and not self._routing.staying
        ):
            self.fail(one, failures.REPLACED, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        logger.info("Request %s goes on looking: %s", one.request_id, reason)
        wait_s = min(FIRST_RETRY_S * 2**one.moves.num_refusals, LAST_RETRY_S)
        one.moves.num_refusals += 1
        asyncio.get_running_loop().call_later(wait_s, self.enqueue, one)

    def _condemn(self, one: InFlight) -> None:
        logger.error("Request %s killed an engine alone", one.request_id)
        self._condemned.add(one)
        # It is among the requests no more.
        self._admission.note_gone(one, self._requests)
        self.fail(one, CONDEMNED, HTTPStatus.BAD_REQUEST)
