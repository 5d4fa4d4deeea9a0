"""Leases: what runs in this replica's engine, for which front, until when.

A lease is a streaming Serve call that lasts as long as its request: while it runs it
holds a slot of the replica, so that Serve's routing, limits and draining count it. Its
tokens travel over the token channel. When its request has ended the front may keep it
for a moment, and then hands over the next one by the token channel too: a Serve call
costs several steps of a fast engine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from serving.engine.compat import EngineCoreRequest, MsgpackDecoder
from serving.replica.seats import Lease, LeaseLostError, Seat, Seats
from serving.replica.token_channel import (
    ABORT,
    ENDED,
    GOODBYE,
    HELLO,
    KEPT,
    NEXT,
    WAITING,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from serving.replica.kinship import Kin
    from serving.replica.token_channel import TokenRelay

logger = logging.getLogger("ray.serve")

OFFER: Final = "offer"
"""Connect first: nothing has been started yet."""

ACCEPTED: Final = "accepted"
"""The request is in the engine."""

BUSY: Final = "busy"
"""A request runs alone here; ask again."""

OTHER_MODEL: Final = "other model"
"""This engine cannot go on with what the front has begun."""

LINK_TIMEOUT_S: Final = 10.0

_decode_ids: Final = msgspec.msgpack.Decoder(list[str]).decode
_decode_next: Final = msgspec.msgpack.Decoder(tuple[str, list[bytes]]).decode


class Leases:
    """Admits requests to one engine and knows when each has ended.

    Attributes:
        on_begun: Told of each request that the engine is given.
    """

    def __init__(
        self,
        relay: TokenRelay,
        num_slots: int,
        add: Callable[[Any], Awaitable[Any]],
        abort: Callable[[list[str]], Awaitable[Any]],
        flush: Callable[[], Awaitable[Any]],
        may_take: Callable[[Kin, Any], bool],
    ) -> None:
        """Let nobody in yet.

        Args:
            relay: Forwards tokens.
            num_slots: Of the engine, slot 0 included.
            add: Hands a request to the engine, `client_index` as it is.
            abort: Ends requests in the engine.
            flush: Returns once the engine has dealt with all that it was told before.
            may_take: Whether it may have a request of a front's.
        """
        self._offer = msgspec.msgpack.encode(relay.offer)
        self._seats = Seats(relay, num_slots)
        self._add, self._abort, self._flush = add, abort, flush
        self._may_take = may_take
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self.on_begun: Callable[[], None] = lambda: None
        self._lone: str | None = None
        self._emptied = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests in the engine."""
        return sum(len(seat.leases) for seat in self._seats)

    @property
    def num_wanted(self) -> int:
        """Requests in the engine, and those that fronts would have in it."""
        return self.num_running + sum(seat.num_waiting for seat in self._seats)

    async def hold(
        self, front: bytes, kin: Kin, frames: Sequence[bytes], *, alone: bool
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Run one request; returns when it has ended.

        Args:
            front: The front's name.
            kin: The front's.
            frames: An `EngineCoreRequest`, encoded as for the engine core.
            alone: Whether it must have the engine for itself.

        Yields:
            `OFFER` with a `LinkOffer` if the front is not connected, and `ACCEPTED`,
            with it too, once the request is in the engine; or only `BUSY`, likewise, or
            `OTHER_MODEL`.

        Raises:
            LeaseLostError: The front cannot be reached, or no slot is free.
        """
        request = self._decoder.decode(frames)
        if not self._may_take(kin, request):
            yield OTHER_MODEL, b""
            return
        if self._lone is not None:
            yield BUSY, self._offer
            return
        seat = self._seats.take(front)
        if not seat.linked.is_set():
            seat.num_invited += 1
            try:
                yield OFFER, self._offer
                await asyncio.wait_for(seat.linked.wait(), LINK_TIMEOUT_S)
            except TimeoutError:
                raise LeaseLostError("the front did not connect") from None
            finally:
                seat.num_invited -= 1
                if not seat.linked.is_set():
                    self._leave_later(front)
            if self._lone is not None:
                yield BUSY, self._offer
                return
        request.client_index = seat.slot
        if alone:
            self._lone = request.request_id
        try:
            if alone:
                await self._wait_until_empty()
                # It will be blamed if the engine dies: so not for one that has died.
                await self._flush()
            if self._seats.find(front) is not seat or not seat.linked.is_set():
                # Its slot may be another's by now, and what the front says of it would
                # find it no more: it would never end.
                raise LeaseLostError("connection lost")
            async for event in self._run(seat, request):
                yield event
        finally:
            if alone:
                self._lone = None

    async def _run(
        self, seat: Seat, request: Any
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        lease = Lease(request.request_id)
        seat.leases[lease.request_id] = lease
        try:
            await self._begin(request)
            yield ACCEPTED, self._offer
            word = await lease.ended
            if word:
                yield word, self._offer
        finally:
            if lease.ended.done() and not lease.ended.cancelled():
                # Whoever called may have left before it could be told: no fault.
                lease.ended.exception()
            seat.spares.pop(lease.request_id, None)
            if seat.leases.pop(lease.request_id, None) and (
                not lease.ended.done() or lease.ended.cancelled()
            ):
                self._start(self._abort([lease.request_id]))
            self._note_ended()

    async def _begin(self, request: Any) -> None:
        self.on_begun()
        await self._add(request)

    def _note_ended(self) -> None:
        if not self.num_running:
            self._emptied.set()

    def hear(self, front: bytes, kind: bytes, payload: bytes) -> None:
        """Act on what a front says, or on its silence.

        Args:
            front: Its name.
            kind: `HELLO`, `ENDED`, `KEPT`, `NEXT`, `ABORT`, `WAITING` or `GOODBYE`.
            payload: Request ids for `ENDED`, `KEPT` and `ABORT`; the last id of a lease
                that was kept, and its next request's frames, for `NEXT`; a number for
                `WAITING`.
        """
        seat = self._seats.find(front)
        if seat is None and kind == HELLO and self._seats.has_free:
            # It took its time, and the lease that invited it has given up.
            seat = self._seats.take(front)
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
        elif kind == NEXT:
            request_id, frames = _decode_next(payload)
            lease = seat.spares.pop(request_id, None)
            # Without it its call has ended, and with that the front's wait.
            if lease is not None and not lease.ended.done():
                self._go_on(seat, lease, frames)
        elif kind in (ENDED, KEPT, ABORT):
            request_ids = _decode_ids(payload)
            if kind == ABORT:
                self._start(self._abort(request_ids))
            for request_id in request_ids:
                if kind == KEPT:
                    self._keep(seat, request_id)
                elif lease := seat.find(request_id):
                    lease.end()

    def _keep(self, seat: Seat, request_id: str) -> None:
        """Let a lease whose request has ended wait for the next one."""
        lease = seat.leases.get(request_id)
        if lease is None or lease.ended.done():
            return
        if request_id == self._lone:
            lease.end()
        else:
            seat.spares[request_id] = seat.leases.pop(request_id)
            self._note_ended()

    def _go_on(self, seat: Seat, lease: Lease, frames: Sequence[bytes]) -> None:
        """Run the next request of a lease that was kept."""
        if self._lone is not None:
            lease.end(BUSY)
            return
        try:
            request = self._decoder.decode(frames)
        except Exception as error:
            lease.fail(error)
            return
        request.client_index = seat.slot
        lease.request_id = request.request_id
        seat.leases[lease.request_id] = lease
        self._start(self._begin_next(lease, request))

    async def _begin_next(self, lease: Lease, request: Any) -> None:
        try:
            await self._begin(request)
        except Exception as error:
            lease.fail(error)

    def _lose_all(self, seat: Seat) -> None:
        if lost := seat.lose_all():
            self._start(self._abort(lost))

    def _leave_later(self, front: bytes) -> None:
        self._start(self._leave(front))

    async def _leave(self, front: bytes) -> None:
        """Free the slot of a front that is gone, once nothing can come in it."""
        await self._flush()
        self._seats.free(front)

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
