"""Replicas whose engines are made up; leases and token channels are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from serving.engine.compat import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    MsgpackEncoder,
)
from serving.engine.shared.replay import emitted_token_ids_of
from serving.front.fleet_client import FleetClient
from serving.front.in_flight import MAX_SHARED_DEATHS, InFlight, Moves
from serving.replica.engine_gone import EngineGoneError
from serving.replica.kinship import Kin, may_take
from serving.replica.leases import Leases
from serving.replica.token_channel import ReplicaState, TokenRelay

DEAD = b"ENGINE_CORE_DEAD"
NUM_SLOTS = 3
STEP_S = 0.002
WAIT_S = 20.0
KIN = Kin("a model", build=2)

OTHER_HOSTS_CLOCK_S = 1e6
"""How far a replica's monotonic clock is ahead of the front's."""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def make_request(name: str, prompt: Sequence[int] = (1, 2), **params: Any) -> Any:
    from vllm import SamplingParams

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(**{"max_tokens": 30, **params}),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def expected_ids(request: Any) -> list[int]:
    """What any fake engine puts out for a request, from first to last."""
    first = request.prompt_token_ids[0]
    return [first * 1000 + n for n in range(request.sampling_params.max_tokens)]


class FakeReplica:
    """Puts out one made-up token for every request and step.

    It keeps who is `running` in its engine, all that was ever `taken`, and ids that it
    was told to forget (`aborted`). It stands still while `is_held`, dies of the third
    token of a request whose prompt begins with `poison`, and says that
    `num_free_kv_tokens` are free, that `num_others` run beside its own, and what its
    `costs` are, as `ReplicaState` names them.
    """

    def __init__(
        self,
        folder: Path,
        poison: int | None = None,
        kin: Kin = KIN,
        max_model_len: int = 1000,
        **offer: Any,
    ) -> None:
        addresses = [
            f"ipc://{folder}/{uuid.uuid4().hex[:8]}" for _ in range(1, NUM_SLOTS)
        ]
        loop = asyncio.get_running_loop()
        self.relay = TokenRelay(
            replica=uuid.uuid4().hex,
            host="127.0.0.1",
            slot_addresses=addresses,
            on_message=lambda *m: loop.call_soon_threadsafe(self.leases.hear, *m),
            dead_frame=DEAD,
            build=kin.build,
            **{"num_seats": 64, "serve_id": "", **offer},
        )
        self.leases = Leases(
            self.relay,
            NUM_SLOTS,
            add=self._add,
            abort=self._abort,
            flush=lambda: asyncio.sleep(0),
            may_take=functools.partial(may_take, kin, max_model_len),
        )
        self.running: dict[str, Any] = {}
        self.taken: list[Any] = []
        self.aborted: list[str] = []
        self.poison = poison
        self.is_alive = True
        self.is_held = False
        self.num_free_kv_tokens = 1_000_000
        self.num_others = 0
        self.costs: dict[str, float] = {}
        self._encoder = MsgpackEncoder()
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUSH) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.linger = 0
            socket.connect(address)
        self.relay.start()
        self._stepping = asyncio.create_task(self._step_on())

    async def _add(self, request: Any) -> None:
        self.taken.append(request)
        emitted = emitted_token_ids_of(request.sampling_params)
        self.running[request.request_id] = [request, len(emitted)]

    async def _abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    async def _step_on(self) -> None:
        while self.is_alive:
            await asyncio.sleep(STEP_S)
            if not self.is_held:
                self._step()
            told = ReplicaState(
                num_running=len(self.running) + self.num_others,
                num_free_kv_tokens=self.num_free_kv_tokens,
                **self.costs,
            )
            self.relay.set_state(told)

    def _step(self) -> None:
        by_slot: dict[int, list[Any]] = {}
        for request_id, (request, num_out) in list(self.running.items()):
            if request.prompt_token_ids[0] == self.poison and num_out >= 3:
                self.die()
                return
            ids = expected_ids(request)
            is_last = num_out + 1 == len(ids)
            reason = FinishReason.LENGTH if is_last else None
            output = make_output(request_id, [ids[num_out]], reason)
            by_slot.setdefault(request.client_index, []).append(output)
            self.running[request_id][1] += 1
            if is_last:
                del self.running[request_id]
        for slot, outputs in by_slot.items():
            self.push(slot, outputs)

    def push(self, slot: int, outputs: list[Any]) -> None:
        """Let the engine say something to the front in a slot."""
        now_s = time.monotonic() + OTHER_HOSTS_CLOCK_S
        step = EngineCoreOutputs(outputs=outputs, timestamp=now_s)
        self._sockets[slot - 1].send_multipart(self._encoder.encode(step))

    def shut_down(self) -> None:
        """End as an engine core does that gets SIGTERM."""
        for name, (request, _) in self.running.items():
            ended = make_output(name, [], FinishReason.ABORT)
            self.push(request.client_index, [ended])
        self.running.clear()
        self.is_alive = False

    def die(self) -> None:
        self.is_alive = False
        self.running.clear()
        self.relay.stop()

    async def close(self) -> None:
        self.die()
        self._stepping.cancel()
        await asyncio.to_thread(self.relay.join, 5)
        self._context.destroy(linger=0)


def make_output(request_id: str, token_ids: list[int], reason: Any) -> Any:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput

    event = EngineCoreEvent.new_event(
        EngineCoreEventType.QUEUED, time.monotonic() + OTHER_HOSTS_CLOCK_S - 1.0
    )
    return EngineCoreOutput(request_id, token_ids, finish_reason=reason, events=[event])


class FakeStream:
    """A streaming call, routed to whichever replica comes next."""

    def __init__(self, fleet: FakeFleet, args: tuple[Any, ...], wanted: str) -> None:
        self._fleet, self._args, self.wanted = fleet, args, wanted
        self.context = contextvars.copy_context()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[tuple[str, bytes]]:
        front, kin, frames, alone = self._args
        while not (replica := self._fleet.choose(self.wanted)):
            await asyncio.sleep(STEP_S)
        if not replica.is_alive:
            raise self._fleet.error_of_the_dead
        holding = replica.leases.hold(front, kin, frames, alone=alone)
        try:
            async for event in holding:
                yield event
        finally:
            # As Serve does when the caller is gone.
            with contextlib.suppress(BaseException):
                await holding.aclose()


class FakeFleet:
    """Routes leases in turn, unless they are meant for a replica."""

    def __init__(self) -> None:
        self.replicas: list[FakeReplica] = []
        self.opened: list[FakeStream] = []
        self.error_of_the_dead: Exception = EngineGoneError()
        self._turn = 0

    def open_stream(self, *args: Any, wanted: str) -> FakeStream:
        stream = FakeStream(self, args, wanted)
        self.opened.append(stream)
        return stream

    def choose(self, wanted: str) -> FakeReplica | None:
        """Serve goes on listing a dead replica for a while."""
        for replica in self.replicas:
            if wanted and replica.relay.offer.serve_id == wanted:
                return replica
        if not self.replicas:
            return None
        self._turn += 1
        return self.replicas[self._turn % len(self.replicas)]


class Scene:
    """A front's client, the fleet below it, and what came up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fleet = FakeFleet()
        self.ids: dict[str, list[int]] = {}
        self.reasons: dict[str, Any] = {}
        self.failures: dict[str, Exception] = {}
        self.replays: list[str] = []
        self.steps: list[Any] = []
        self._replicas: list[FakeReplica] = []
        self._clients: list[FleetClient] = []
        self.client = self.make_client(b"a front")
        self._reading = asyncio.create_task(self._read())

    def replace_client(self, name: bytes, **options: Any) -> None:
        self.client.shutdown()
        self._reading.cancel()
        self.client = self.make_client(name, **options)
        self._reading = asyncio.create_task(self._read())

    def make_client(self, name: bytes, **options: Any) -> FleetClient:
        client = FleetClient(
            front=name,
            supported_tasks=("generate",),
            open_stream=self.fleet.open_stream,
            **{"kin": KIN, **options},
        )
        client.failover.on_failure = self.failures.__setitem__
        client.failover.on_replay = lambda reason, _tokens: self.replays.append(reason)
        self._clients.append(client)
        return client

    def add_replica(self, **options: Any) -> FakeReplica:
        replica = FakeReplica(self.folder, **options)
        self.fleet.replicas.append(replica)
        self._replicas.append(replica)
        return replica

    async def _read(self) -> None:
        while True:
            step = await self.client.get_output_async()
            self.steps.append(step)
            for output in step.outputs:
                self.ids.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason

    async def send(self, count: int, name: str = "r", **params: Any) -> list[Any]:
        requests = [
            make_request(f"{name}{n}", (n + 1, 7), **params) for n in range(count)
        ]
        for request in requests:
            await self.client.add_request_async(request)
        return requests

    async def add_front(self) -> FleetClient:
        """Connect another front to the only replica, once both know of each other."""
        other = self.make_client(b"another")
        for client in (self.client, other):
            await client.add_request_async(make_request(f"first of {id(client)}"))
        await until(lambda: self.client.num_links == other.num_links == 1)
        links = [*self.client._links, *other._links]
        await until(lambda: [one.state.num_fronts for one in links] == [2, 2])
        return other

    def send_suspect(self) -> Any:
        """Send a request that may have killed engines, and has the next one alone."""
        request = make_request("suspect", (3, 7))
        one = InFlight(request, moves=Moves(num_deaths=MAX_SHARED_DEATHS))
        self.client.admission.admit(one, self.client._queue)
        self.client._requests.add(one)
        self.client.failover.enqueue(one)
        return request

    async def begin(self, count: int, **params: Any) -> list[Any]:
        requests = await self.send(count, **params)
        await until(lambda: all(self.ids.get(one.request_id) for one in requests))
        return requests

    async def check_all(self, requests: list[Any]) -> None:
        await until(lambda: all(r.request_id in self.reasons for r in requests))
        for request in requests:
            assert self.ids[request.request_id] == expected_ids(request)
            assert self.reasons[request.request_id] == FinishReason.LENGTH
        assert not self.failures

    async def close(self) -> None:
        self._reading.cancel()
        for client in self._clients:
            client.shutdown()
        for replica in self._replicas:
            await replica.close()
