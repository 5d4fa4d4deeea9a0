"""A front's end of one replica's token channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from policies.decisions.places import count_kept
from serving.front.failures import DIED
from serving.replica.token_channel import (
    ABORT,
    ENDED,
    HELLO,
    KEPT,
    NEXT,
    WAITING,
    ReplicaState,
    decode_sequence,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from serving.replica.token_channel import LinkOffer

    OnFrames = Callable[["TokenLink", Sequence[Any]], None]
    OnState = Callable[["TokenLink"], None]
    OnLost = Callable[["TokenLink", str], None]

logger = logging.getLogger("ray.serve")

LOOK_S: Final = 1.0
MAX_SILENT_LOOKS: Final = 10
"""A replica speaks four times a second; one that is silent for so long is gone, or its
host does nothing any more."""

SPARE_SHARE: Final = 8
"""One in so many requests more than an engine has seats for may be leased, so that one
is there when a seat becomes free: a lease takes about as long as a step."""

MAX_AT_ONCE: Final = 32
"""Messages that are read before anything else in the process has its turn."""

_BAD_EVENTS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class TokenLink:
    """Receives tokens from one replica until one message is missing.

    A link is used once: whatever breaks it (the connection closes, a number is left
    out, silence, the engine's last word) loses it for good, and with it the requests
    on it. The next lease from the same replica opens another.

    Attributes:
        offer: Where it leads to.
        state: What the replica said last.
        num_held: Requests of this front that the replica has.
        num_coming: Requests of this front that are on their way to it.
        num_prompt_tokens: Of this front's requests, which it has still to compute.
        heard_s: When it last said something, monotonic.
        clean_s: Leases opened later cannot have begun over an earlier link, monotonic.
        is_lost: Whether it has been lost.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        front: bytes,
        offer: LinkOffer,
        on_frames: OnFrames,
        on_state: OnState,
        on_lost: OnLost,
        *,
        is_first: bool = True,
    ) -> None:
        """Connect, and say hello.

        Args:
            context: Of the front.
            front: The front's name, unique in the cluster.
            offer: From a lease.
            on_frames: Given each message's frames, as the engine core made them.
            on_state: Told after each message.
            on_lost: Told once, with the reason.
            is_first: Whether there was none from this front to this replica before.
        """
        self.offer = offer
        self.state = ReplicaState()
        self.num_held = self.num_coming = self.num_prompt_tokens = 0
        self.heard_s = time.monotonic()
        self.clean_s = -math.inf if is_first else math.inf
        self.is_lost = False
        self._on_frames = on_frames
        self._on_state = on_state
        self._on_lost = on_lost
        self._decode_state = msgspec.msgpack.Decoder(ReplicaState).decode
        self._expected = 0
        self._num_others = self._num_held_then = self._told_waiting = 0
        self._socket = context.socket(zmq.DEALER)
        public_key, secret_key = zmq.curve_keypair()
        self._socket.curve_serverkey = offer.public_key
        self._socket.curve_publickey = public_key
        self._socket.curve_secretkey = secret_key
        self._socket.identity = front
        self._socket.ipv6 = "[" in offer.address
        self._socket.rcvhwm = self._socket.sndhwm = 0
        self._socket.linger = 0
        self._monitor = self._socket.get_monitor_socket(_BAD_EVENTS)
        self._socket.connect(offer.address)
        self._is_cut = False
        # zmq's own asyncio sockets double what a message costs.
        self._loop = asyncio.get_running_loop()
        self._fds = (self._socket.FD, self._monitor.FD)
        self._loop.add_reader(self._fds[0], self._read)
        self._loop.add_reader(self._fds[1], self._hear_of_connection)
        # A descriptor tells of nothing until its socket was once found empty.
        self._soon: asyncio.Handle | None = self._loop.call_soon(self._read)
        self._loop.call_soon(self._hear_of_connection)
        self._watching = asyncio.create_task(self._watch_silence())
        self._send(HELLO, b"")

    @property
    def num_requests(self) -> int:
        """Requests that the replica has, or will have in a moment."""
        return self._num_others + self.num_held + self.num_coming

    @property
    def num_kept_seats(self) -> int:
        """This front's part of those left to whoever has few, and no spare ones."""
        num_seats = self.offer.num_seats
        kept = math.ceil(num_seats / SPARE_SHARE) + count_kept(num_seats)
        return math.ceil(kept / self.state.num_fronts)

    @property
    def num_to_lease(self) -> int:
        """Requests that all fronts together may have there."""
        num_seats = self.offer.num_seats
        return num_seats + math.ceil(num_seats / SPARE_SHARE)

    @property
    def num_free_seats(self) -> int:
        """Requests that this front may add, if every front takes its part."""
        free = self.num_to_lease - self._num_others - self._num_held_then
        share = math.ceil(free / self.state.num_fronts)
        return max(0, share - (self.num_held - self._num_held_then))

    def end(self, request_ids: Iterable[str]) -> None:
        """Tell the replica that requests have ended, which ends their leases."""
        self._send(ENDED, msgspec.msgpack.encode(list(request_ids)))

    def keep(self, request_ids: Iterable[str]) -> None:
        """Tell the replica that requests have ended, and their leases have not."""
        self._send(KEPT, msgspec.msgpack.encode(list(request_ids)))

    def go_on(self, request_id: str, frames: Sequence[bytes]) -> None:
        """Hand a lease's next request to the replica.

        Args:
            request_id: Of the last one.
            frames: The next, encoded as for the engine core.
        """
        self._send(NEXT, msgspec.msgpack.encode((request_id, frames)))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the replica that nobody waits for requests any more."""
        self._send(ABORT, msgspec.msgpack.encode(list(request_ids)))

    def tell_waiting(self, num_waiting: int) -> None:
        """Tell the replica how much waits that it could have, if it is news."""
        if num_waiting != self._told_waiting:
            self._told_waiting = num_waiting
            self._send(WAITING, msgspec.msgpack.encode(num_waiting))

    def close(self, reason: str) -> None:
        """Lose the link. Idempotent."""
        if self.is_lost:
            return
        self.is_lost = True
        self._watching.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._on_lost(self, reason)

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self.is_lost:
            return
        # Its queue has no limit: it takes nothing only if the connection has failed for
        # good, and then the monitor ends the link.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((kind, payload), zmq.NOBLOCK)
        # It may have noticed what has come, of which the descriptor tells only once.
        if self._socket.EVENTS & zmq.POLLIN:
            self._read_soon()

    def _read_soon(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Read all there is: the descriptor tells of it no more."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        try:
            for _ in range(MAX_AT_ONCE):
                if self.is_lost:
                    return
                self._take(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            if self._is_cut:
                self.close("connection closed")
        except Exception:
            logger.exception("The token channel to %s failed", self.offer.replica)
            self.close("failure")
        else:
            self._read_soon()

    def _take(self, message: Sequence[Any]) -> None:
        sequence, state, *frames = message
        if decode_sequence(sequence.buffer) != self._expected:
            self.close("gap")
            return
        self._expected += 1
        self.heard_s = time.monotonic()
        # The replica has heard hello, and acts on it before it hears of a later lease.
        self.clean_s = min(self.clean_s, self.heard_s)
        self.state = self._decode_state(state.buffer)
        if frames:
            self._on_frames(self, frames)
        num_requests = self.state.num_running + self.state.num_waiting
        # Of what this message did not end. Until the next one, what this front adds or
        # ends is counted by itself.
        self._num_held_then = self.num_held
        self._num_others = max(0, num_requests - self.num_held)
        self._on_state(self)
        if not self.state.is_alive:
            self.close(DIED)

    def _hear_of_connection(self) -> None:
        if self.is_lost:
            return
        with contextlib.suppress(zmq.Again):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            # What had arrived before is read first.
            self._is_cut = True
            self._read()

    async def _watch_silence(self) -> None:
        """Count looks, not seconds: a front that stood still itself hears late."""
        num_silent, seen = 0, -1
        while num_silent < MAX_SILENT_LOOKS:
            await asyncio.sleep(LOOK_S)
            num_silent = num_silent + 1 if seen == self._expected else 0
            seen = self._expected
        self.close("silence")
