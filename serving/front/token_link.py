"""A front's end of one replica's token channel."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from serving.front.failures import DIED
from serving.front.link_load import LinkLoad
from serving.front.token_socket import TokenSocket
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

    import zmq

    from serving.replica.token_channel import LinkOffer

    OnFrames = Callable[["TokenLink", Sequence[Any]], None]
    OnState = Callable[["TokenLink"], None]
    OnLost = Callable[["TokenLink", str], None]

LOOK_S: Final = 1.0
MAX_SILENT_LOOKS: Final = 10
"""A replica speaks four times a second; one that is silent for so long is gone, or its
host does nothing any more."""

_decode_state: Final = msgspec.msgpack.Decoder(ReplicaState).decode


class TokenLink:
    """Receives tokens from one replica until one message is missing.

    A link is used once: whatever breaks it (the connection closes, a number is left
    out, silence, the engine's last word) loses it for good, and with it the requests
    on it. The next lease from the same replica opens another.

    Attributes:
        offer: Where it leads to.
        state: What the replica said last.
        load: What it has to do, by that and by what this front has done since.
        heard_s: When it last said something, monotonic.
        clean_s: Leases opened later cannot have begun over an earlier link, monotonic.
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
        self.load = LinkLoad(offer.num_seats)
        self.heard_s = time.monotonic()
        self.clean_s = -math.inf if is_first else math.inf
        self._on_frames = on_frames
        self._on_state = on_state
        self._on_lost = on_lost
        self._expected = self._told_waiting = 0
        self._socket = TokenSocket(context, front, offer, self._take, self.close)
        self._watching = asyncio.create_task(self._watch_silence())
        self._socket.send(HELLO, b"")

    @property
    def is_lost(self) -> bool:
        """Whether it has been lost."""
        return not self._socket.is_open

    def end(self, request_ids: Iterable[str]) -> None:
        """Tell the replica that requests have ended, which ends their leases."""
        self._socket.send(ENDED, msgspec.msgpack.encode(list(request_ids)))

    def keep(self, request_ids: Iterable[str]) -> None:
        """Tell the replica that requests have ended, and their leases have not."""
        self._socket.send(KEPT, msgspec.msgpack.encode(list(request_ids)))

    def go_on(self, request_id: str, frames: Sequence[bytes]) -> None:
        """Hand a lease's next request to the replica.

        Args:
            request_id: Of the last one.
            frames: The next, encoded as for the engine core.
        """
        self._socket.send(NEXT, msgspec.msgpack.encode((request_id, frames)))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the replica that nobody waits for requests any more."""
        self._socket.send(ABORT, msgspec.msgpack.encode(list(request_ids)))

    def tell_waiting(self, num_waiting: int) -> None:
        """Tell the replica how much waits that it could have, if it is news."""
        if num_waiting != self._told_waiting:
            self._told_waiting = num_waiting
            self._socket.send(WAITING, msgspec.msgpack.encode(num_waiting))

    def close(self, reason: str) -> None:
        """Lose the link. Idempotent."""
        if self.is_lost:
            return
        self._watching.cancel()
        self._socket.close()
        self._on_lost(self, reason)

    def _take(self, message: Sequence[Any]) -> None:
        sequence, state, *frames = message
        if decode_sequence(sequence.buffer) != self._expected:
            self.close("gap")
            return
        self._expected += 1
        self.heard_s = time.monotonic()
        # The replica has heard hello, and acts on it before it hears of a later lease.
        self.clean_s = min(self.clean_s, self.heard_s)
        self.state = _decode_state(state.buffer)
        if frames:
            self._on_frames(self, frames)
        self.load.take(self.state)
        self._on_state(self)
        if not self.state.is_alive:
            self.close(DIED)

    async def _watch_silence(self) -> None:
        """Count looks, not seconds: a front that stood still itself hears late."""
        num_silent, seen = 0, -1
        while num_silent < MAX_SILENT_LOOKS:
            await asyncio.sleep(LOOK_S)
            num_silent = num_silent + 1 if seen == self._expected else 0
            seen = self._expected
        self.close("silence")
