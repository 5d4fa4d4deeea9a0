"""Leases: what runs in this replica's engine, for which front, until when.

A lease is a streaming Serve call that lasts as long as its request: while it runs it
holds a slot of the replica, so that Serve's routing, limits, autoscaling and draining
count it. Its tokens travel over the token channel.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from serving.engine.compat import EngineCoreRequest, MsgpackDecoder
from serving.replica.token_channel import ABORT, ENDED, GOODBYE, HELLO, WAITING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from serving.replica.token_channel import TokenRelay

logger = logging.getLogger("ray.serve")

OFFER: Final = "offer"
"""Connect first: nothing has been started yet."""

ACCEPTED: Final = "accepted"
"""The request is in the engine."""

BUSY: Final = "busy"
"""A request runs alone here; ask again."""

LINK_TIMEOUT_S: Final = 10.0


class LeaseLostError(Exception):
    """A lease ended before its request did."""


@dataclasses.dataclass
class _Seat:
    """A front's place at this replica.

    Attributes:
        slot: Of the engine.
        linked: Whether its token channel stands.
        leases: Resolved when a request has ended, by its id.
        num_waiting: What waits at the front for a replica, this one's share.
    """

    slot: int
    linked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    leases: dict[str, asyncio.Future[None]] = dataclasses.field(default_factory=dict)
    num_waiting: int = 0


class Leases:
    """Admits requests to one engine and knows when each has ended."""

    def __init__(
        self,
        relay: TokenRelay,
        num_slots: int,
        add: Callable[[Any], Awaitable[Any]],
        abort: Callable[[list[str]], Awaitable[Any]],
        flush: Callable[[], Awaitable[Any]],
    ) -> None:
        """Let nobody in yet.

        Args:
            relay: Forwards tokens.
            num_slots: Of the engine, slot 0 included.
            add: Hands a request to the engine, `client_index` as it is.
            abort: Ends requests in the engine.
            flush: Returns once the engine has dealt with all that it was told before.
        """
        self._relay = relay
        self._offer = msgspec.msgpack.encode(relay.offer)
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._add, self._abort, self._flush = add, abort, flush
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._seats: dict[bytes, _Seat] = {}
        self._lone: str | None = None
        self._emptied = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests in the engine."""
        return sum(len(seat.leases) for seat in self._seats.values())

    @property
    def num_wanted(self) -> int:
        """Requests in the engine, and those that fronts would have in it."""
        return self.num_running + sum(seat.num_waiting for seat in self._seats.values())

    async def hold(
        self, front: bytes, frames: Sequence[bytes], *, alone: bool
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Run one request; returns when it has ended.

        Args:
            front: The front's name.
            frames: An `EngineCoreRequest`, encoded as for the engine core.
            alone: Whether it must have the engine for itself.

        Yields:
            `OFFER` with a `LinkOffer` if the front is not connected, and `ACCEPTED`,
            with it too, once the request is in the engine; or only `BUSY`.

        Raises:
            LeaseLostError: The front cannot be reached, or no slot is free.
        """
        if self._lone is not None:
            yield BUSY, b""
            return
        seat = self._take_seat(front)
        if not seat.linked.is_set():
            yield OFFER, self._offer
            try:
                await asyncio.wait_for(seat.linked.wait(), LINK_TIMEOUT_S)
            except TimeoutError:
                self._leave_later(front)
                raise LeaseLostError("the front did not connect") from None
            if self._lone is not None:
                yield BUSY, b""
                return
        request = self._decoder.decode(frames)
        request.client_index = seat.slot
        if alone:
            self._lone = request.request_id
        try:
            if alone:
                await self._wait_until_empty()
                # It will be blamed if the engine dies: so not for one that has died.
                await self._flush()
            if self._seats.get(front) is not seat or not seat.linked.is_set():
                # Its slot may be another's by now, and what the front says of it would
                # find it no more: it would never end.
                raise LeaseLostError("connection lost")
            async for event in self._run(seat, request):
                yield event
        finally:
            if alone:
                self._lone = None

    async def _run(
        self, seat: _Seat, request: Any
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        request_id = request.request_id
        ended = asyncio.get_running_loop().create_future()
        seat.leases[request_id] = ended
        try:
            await self._add(request)
            yield ACCEPTED, self._offer
            await ended
        finally:
            if not ended.done() or ended.cancelled():
                self._start(self._abort([request_id]))
            seat.leases.pop(request_id, None)
            if not self.num_running:
                self._emptied.set()

    def hear(self, front: bytes, kind: bytes, payload: bytes) -> None:
        """Act on what a front says, or on its silence.

        Args:
            front: Its name.
            kind: `HELLO`, `ENDED`, `ABORT`, `WAITING` or `GOODBYE`.
            payload: Request ids for `ENDED` and `ABORT`, a number for `WAITING`.
        """
        seat = self._seats.get(front)
        if seat is None and kind == HELLO and self._free_slots:
            # It took its time, and the lease that invited it has given up.
            seat = self._take_seat(front)
        if seat is None:
            return
        if kind == HELLO:
            # What ran over an earlier connection is lost: tokens may be missing.
            self._lose_all(seat)
            seat.linked.set()
        elif kind == WAITING:
            seat.num_waiting = msgspec.msgpack.decode(payload, type=int)
        elif kind == GOODBYE:
            seat.linked.clear()
            seat.num_waiting = 0
            self._lose_all(seat)
            self._leave_later(front)
        elif kind in (ENDED, ABORT):
            request_ids = msgspec.msgpack.decode(payload, type=list[str])
            if kind == ABORT:
                self._start(self._abort(request_ids))
            for request_id in request_ids:
                ended = seat.leases.get(request_id)
                if ended is not None and not ended.done():
                    ended.set_result(None)

    def _take_seat(self, front: bytes) -> _Seat:
        seat = self._seats.get(front)
        if seat is None:
            if not self._free_slots:
                raise LeaseLostError("more fronts than http.fronts.max allows for")
            seat = self._seats[front] = _Seat(self._free_slots.pop())
            self._relay.give_slot(seat.slot, front)
        return seat

    def _lose_all(self, seat: _Seat) -> None:
        lost = [name for name, ended in seat.leases.items() if not ended.done()]
        for request_id in lost:
            seat.leases[request_id].set_exception(LeaseLostError("connection lost"))
        if lost:
            self._start(self._abort(lost))

    def _leave_later(self, front: bytes) -> None:
        self._start(self._leave(front))

    async def _leave(self, front: bytes) -> None:
        """Free the slot of a front that is gone, once nothing can come in it."""
        await self._flush()
        seat = self._seats.get(front)
        if seat is not None and not (seat.linked.is_set() or seat.leases):
            del self._seats[front]
            self._relay.take_slot(seat.slot)
            self._free_slots.append(seat.slot)

    async def _wait_until_empty(self) -> None:
        while self.num_running:
            self._emptied.clear()
            await self._emptied.wait()

    def _start(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(_log_failure(work))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


async def _log_failure(work: Awaitable[Any]) -> None:
    try:
        await work
    except Exception as error:
        logger.warning("The engine did not take an order: %r", error)
