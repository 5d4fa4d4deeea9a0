"""Tokens from an engine to the fronts: one message per engine step and front.

The engine core pushes what each of its clients is to receive into a socket of the
client's own (a *slot*). A thread of the replica's actor forwards those messages,
unread, to the front that holds the slot:

    replica -> front    [sequence, state, frame, ...]   frames as the engine made them
    front -> replica    [kind, payload]                 HELLO, ENDED, KEPT, NEXT, ABORT
                                                        or WAITING

`sequence` counts a front's messages from 0, so that one that got lost shows. `state` is
what routing wants to know of the replica (`ReplicaState`); an idle replica sends it
four times a second, without frames. The socket is encrypted (CURVE); its public key
reaches fronts inside leases only, and nobody without it gets past the handshake.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    OnMessage = Callable[[bytes, bytes, bytes], object]

HELLO: Final = b"hello"
ENDED: Final = b"ended"
KEPT: Final = b"kept"
NEXT: Final = b"next"
ABORT: Final = b"abort"
WAITING: Final = b"waiting"
GOODBYE: Final = b"goodbye"
"""Not sent: how a front that cannot be reached any more is reported."""

HEARTBEAT_S: Final = 0.25

MAX_UNSENT: Final = 1000
"""Messages to a front that does not read; the next is dropped, which it will see."""

_SEQUENCE = struct.Struct("<Q")


class ReplicaState(msgspec.Struct, array_like=True, frozen=True):
    """What a replica tells every front with every step.

    Attributes:
        is_alive: False once, as the engine's last word.
        num_running: Requests in the engine's batch.
        num_waiting: Requests the engine lets wait.
        kv_cache_usage: Share of the KV blocks held by requests, 0-1.
        num_free_kv_tokens: Tokens for which there are KV blocks that no request holds.
        num_fronts: Fronts that are told this.
        base_ms: Of a step, whatever it holds; 0 while nothing is known of costs.
        request_ms: Of each request in it, its drafts included.
        prompt_token_ms: Of each prompt token computed.
        tokens_per_step: Of each request in each step, accepted drafts included.
    """

    is_alive: bool = True
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_free_kv_tokens: int = 0
    num_fronts: int = 1
    base_ms: float = 0.0
    request_ms: float = 0.0
    prompt_token_ms: float = 0.0
    tokens_per_step: float = 1.0

    @property
    def costs_are_known(self) -> bool:
        """Whether steps have costs that one can reckon with; peers may err."""
        costs = (self.request_ms, self.prompt_token_ms)
        return (
            0.0 < self.base_ms < math.inf
            and all(0.0 <= cost < math.inf for cost in costs)
            and 0.0 < self.tokens_per_step < math.inf
        )


class LinkOffer(msgspec.Struct, frozen=True):
    """Where a front reaches a replica's token channel.

    Attributes:
        replica: Unique to one run of one engine.
        address: ZMQ address.
        public_key: Of the socket, Z85.
        num_seats: Requests the engine runs at a time.
        serve_id: Serve's name of the replica.
        build: As `Kin` has it.
    """

    replica: str
    address: str
    public_key: bytes
    num_seats: int
    serve_id: str
    build: int = 0


def decode_sequence(data: Any) -> int:
    """Read a message's number.

    Raises:
        struct.error: It is none.
    """
    return int(_SEQUENCE.unpack(data)[0])


@dataclass(slots=True)
class _Front:
    """What a front was sent: how many messages, and when the latest."""

    num_messages: int = 0
    latest_s: float = 0.0


class TokenRelay(threading.Thread):
    """Forwards an engine's outputs to fronts, in a thread of its own.

    Slot 0 is not its business: the replica itself reads it.
    """

    def __init__(
        self,
        *,
        replica: str,
        host: str,
        num_seats: int,
        slot_addresses: Sequence[str],
        on_message: OnMessage,
        dead_frame: bytes,
        serve_id: str = "",
        build: int = 0,
    ) -> None:
        """Bind all sockets; nothing is forwarded before `start`.

        Args:
            replica: Unique to this run of this engine.
            host: Address to listen on, reachable for fronts and best for nobody else.
            num_seats: Requests the engine runs at a time.
            slot_addresses: Where the engine will push outputs, for slots 1 and up.
            on_message: Told what fronts say, in this thread: front, kind, payload.
            dead_frame: What the engine core pushes when it dies.
            serve_id: Serve's name of the replica.
            build: As `Kin` has it.
        """
        super().__init__(name="token-relay", daemon=True)
        self._context = zmq.Context()
        self._fronts_socket = self._context.socket(zmq.ROUTER)
        public_key, secret_key = zmq.curve_keypair()
        self._fronts_socket.curve_server = True
        self._fronts_socket.curve_secretkey = secret_key
        self._fronts_socket.ipv6 = ":" in host
        self._fronts_socket.sndhwm = MAX_UNSENT
        self._fronts_socket.rcvhwm = 0
        self._fronts_socket.linger = 0
        # A front that connects anew takes its name back from a connection nobody has
        # closed; a message to one that is gone fails instead of vanishing.
        self._fronts_socket.router_handover = True
        self._fronts_socket.router_mandatory = True
        listen = f"[{host}]" if ":" in host else host
        port = self._fronts_socket.bind_to_random_port(f"tcp://{listen}")
        self.offer = LinkOffer(
            replica, f"tcp://{listen}:{port}", public_key, num_seats, serve_id, build
        )
        self._poller = zmq.Poller()
        self._poller.register(self._fronts_socket, zmq.POLLIN)
        self._slots: dict[Any, int] = {}
        for slot, address in enumerate(slot_addresses, start=1):
            socket = self._context.socket(zmq.PULL)
            socket.rcvhwm = 0
            socket.bind(address)
            self._poller.register(socket, zmq.POLLIN)
            self._slots[socket] = slot
        self._on_message = on_message
        self._dead_frame = dead_frame
        self._owners: dict[int, bytes] = {}
        self._fronts: dict[bytes, _Front] = {}
        self._state = msgspec.msgpack.encode(ReplicaState())
        self._sentinels: set[int] = set()
        self._stopping = False

    def give_slot(self, slot: int, front: bytes) -> None:
        """Let a front receive what the engine pushes into a slot."""
        self._owners[slot] = front

    def take_slot(self, slot: int) -> None:
        """Drop whatever else comes in a slot."""
        self._owners.pop(slot, None)

    def set_state(self, state: ReplicaState) -> None:
        """Tell fronts this from the next message on."""
        shared = msgspec.structs.replace(state, num_fronts=max(1, len(self._fronts)))
        self._state = msgspec.msgpack.encode(shared)

    def watch_processes(self, sentinels: Sequence[int]) -> None:
        """Tell all fronts that the engine is dead as soon as one of these ends.

        Args:
            sentinels: `multiprocessing.Process.sentinel` of the engine's processes.
        """
        self._sentinels.update(sentinels)

    def stop(self) -> None:
        """End the thread within a heartbeat."""
        self._stopping = True

    def run(self) -> None:
        """Forward until stopped."""
        watched: set[int] = set()
        while not self._stopping:
            for sentinel in self._sentinels - watched:
                self._poller.register(sentinel, zmq.POLLIN)
                watched.add(sentinel)
            for source, _ in self._poller.poll(round(1000 * HEARTBEAT_S)):
                if source in self._slots:
                    self._forward(self._slots[source], source)
                elif source == self._fronts_socket:
                    self._hear()
                else:
                    self._poller.unregister(source)
                    self._tell_dead()
            self._beat()
        self._context.destroy(linger=0)

    def _forward(self, slot: int, source: Any) -> None:
        """Hand on all that has come in a slot."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
                if len(frames) == 1 and frames[0].buffer == self._dead_frame:
                    self._tell_dead()
                elif (front := self._owners.get(slot)) is not None:
                    self._send(front, frames)

    def _hear(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._fronts_socket.recv_multipart(zmq.NOBLOCK)
                if len(message) != 3:
                    continue
                front, kind, payload = message
                self._on_message(front, kind, payload)
                if kind == HELLO:
                    self._fronts[front] = _Front()
                    # Whatever a front asks for once it has this comes after its hello.
                    self._send(front, ())

    def _send(self, front: bytes, frames: Sequence[Any]) -> None:
        sent = self._fronts.get(front)
        if sent is None:
            return
        number = sent.num_messages
        # A message that cannot be sent takes its number along: the front sees the gap.
        sent.num_messages += 1
        sent.latest_s = time.monotonic()
        try:
            self._fronts_socket.send_multipart(
                (front, _SEQUENCE.pack(number), self._state, *frames),
                zmq.NOBLOCK,
                copy=False,
            )
        except zmq.Again:
            pass
        except zmq.ZMQError:
            del self._fronts[front]
            self._on_message(front, GOODBYE, b"")

    def _tell_dead(self) -> None:
        self._state = msgspec.msgpack.encode(ReplicaState(is_alive=False))
        for front in list(self._fronts):
            self._send(front, ())

    def _beat(self) -> None:
        late_s = time.monotonic() - HEARTBEAT_S
        for front, sent in list(self._fronts.items()):
            if sent.latest_s <= late_s:
                self._send(front, ())
