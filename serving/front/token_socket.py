"""The connection under a token link: sends, and reads until it is cut."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.replica.token_channel import LinkOffer

logger = logging.getLogger("ray.serve")

MAX_AT_ONCE: Final = 32
"""Messages that are read before anything else in the process has its turn."""

_BAD_EVENTS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class TokenSocket:
    """A ZeroMQ socket in asyncio's loop, used once: a lost connection stays lost.

    Attributes:
        is_open: Until `close`.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        front: bytes,
        offer: LinkOffer,
        on_message: Callable[[Sequence[Any]], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Connect.

        Args:
            context: Of the front.
            front: The front's name, unique in the cluster.
            offer: From a lease.
            on_message: Given the frames of each message.
            on_end: Told why nothing more will come; it closes the socket.
        """
        self.is_open = True
        self._name = offer.replica
        self._on_message, self._on_end = on_message, on_end
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

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send a message, if the socket is still open."""
        if not self.is_open:
            return
        # Its queue has no limit: it takes nothing only if the connection has failed for
        # good, and then the monitor ends the link.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((kind, payload), zmq.NOBLOCK)
        # It may have noticed what has come, of which the descriptor tells only once.
        if self._socket.EVENTS & zmq.POLLIN:
            self._read_soon()

    def close(self) -> None:
        """Send and read nothing more. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

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
                if not self.is_open:
                    return
                self._on_message(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            if self._is_cut:
                self._on_end("connection closed")
        except Exception:
            logger.exception("The token channel to %s failed", self._name)
            self._on_end("failure")
        else:
            self._read_soon()

    def _hear_of_connection(self) -> None:
        if not self.is_open:
            return
        with contextlib.suppress(zmq.Again):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            # What had arrived before is read first.
            self._is_cut = True
            self._read()
