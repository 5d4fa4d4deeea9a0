"""Tokens between a replica's relay and a front's link, over real sockets."""

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from serving.front import token_link, token_socket
from serving.front.token_link import TokenLink
from serving.replica import token_channel
from serving.replica.token_channel import HELLO, ReplicaState, TokenRelay
from tests.front.fake_fleet import WAIT_S, until

pytestmark = pytest.mark.anyio

DEAD = b"ENGINE_CORE_DEAD"
FRONT = b"a front"


class Ends:
    """A relay with one slot, its engine's socket, and a front connected to it."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[tuple[bytes, bytes, bytes]] = []
        self.steps: list[list[bytes]] = []
        self.lost: list[str] = []
        address = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
        self.relay = TokenRelay(
            replica="a replica",
            host="127.0.0.1",
            num_seats=4,
            slot_addresses=[address],
            on_message=lambda *message: self.heard.append(message),
            dead_frame=DEAD,
        )
        self.relay.give_slot(1, FRONT)
        self.relay.start()
        self.engine = zmq.Context.instance().socket(zmq.PUSH)
        self.engine.linger = 0
        self.engine.connect(address)
        self.context = zmq.Context()
        self.link = self.connect()

    def connect(self, **changes: Any) -> TokenLink:
        return TokenLink(
            self.context,
            FRONT,
            msgspec.structs.replace(self.relay.offer, **changes),
            lambda _, frames: self.steps.append([bytes(f.buffer) for f in frames]),
            lambda _: None,
            lambda _, reason: self.lost.append(reason),
        )

    def close(self) -> None:
        self.link.close("test over")
        self.relay.stop()
        self.relay.join(WAIT_S)
        self.engine.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    ends = Ends(tmp_path)
    try:
        await until(lambda: (FRONT, HELLO, b"") in ends.heard)
        yield ends
    finally:
        ends.close()


async def test_seats_are_counted_after_what_a_message_has_ended(ends):
    """Else the requests of others pass for those that have just ended here."""
    link = ends.link
    link.load.num_held = 3
    link._on_frames = lambda *_: setattr(link.load, "num_held", 0)
    ends.relay.set_state(ReplicaState(num_running=4))
    ends.engine.send_multipart([b"a step"])
    await until(lambda: not link.load.num_held)
    # Four seats and one to spare; all that runs is of other fronts.
    assert link.load.num_free_seats == 1


@pytest.mark.faults
async def test_a_message_left_out_loses_the_link(ends):
    """Tokens would be missing in the middle of a sentence."""
    ends.engine.send(b"first")
    await until(lambda: ends.steps)
    ends.relay._fronts[FRONT].num_messages += 1
    ends.engine.send(b"third")
    await until(lambda: ends.lost)
    assert ends.lost == ["gap"]
    assert ends.steps == [[b"first"]]


@pytest.mark.faults
@pytest.mark.parametrize("length", [0, 1, -1])
async def test_a_message_torn_on_its_way_loses_the_link(length, ends):
    """Tokens may have been in it."""
    ends.relay._state = ends.relay._state[:length]
    await until(lambda: ends.lost)
    assert ends.lost == ["failure"]


@pytest.mark.faults
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("cost", ["base_ms", "request_ms", "tokens_per_step"])
def test_costs_that_cannot_be_are_unknown(cost, value):
    state = ReplicaState(base_ms=8.0, request_ms=0.5)
    assert state.costs_are_known
    assert not msgspec.structs.replace(state, **{cost: value}).costs_are_known


async def test_steps_arrive_whole_and_in_order_and_the_last_word_loses_the_link(ends):
    sent = [[b"step %d" % n, bytes(1000 * (n % 3))] for n in range(200)]
    for frames in sent:
        ends.engine.send_multipart(frames)
    ends.engine.send(DEAD)
    await until(lambda: ends.lost)
    assert ends.lost == ["engine died"]
    assert ends.steps == sent


async def test_what_came_before_a_send_is_not_overlooked(ends):
    """Sending notices it, and the descriptor tells of it no more."""
    ends.relay._beat = lambda: None  # type: ignore[method-assign]  # silent
    await asyncio.sleep(2 * token_channel.HEARTBEAT_S)
    ends.engine.send(b"a step")
    # The front stands still meanwhile.
    time.sleep(0.2)
    ends.link.end(["a request"])
    async with asyncio.timeout(2.0):
        await until(lambda: ends.steps)


async def test_a_flood_does_not_hold_up_the_front(ends):
    turns: list[int] = []

    def take_turn() -> None:
        turns.append(len(ends.steps))
        if turns[-1] < 300:
            asyncio.get_running_loop().call_soon(take_turn)

    for number in range(300):
        ends.engine.send(b"%d" % number)
    time.sleep(0.3)
    take_turn()
    await until(lambda: turns[-1] == 300)
    at_once = max(b - a for a, b in itertools.pairwise(turns))
    # What is left over, and what the descriptor tells of.
    assert at_once <= 2 * token_socket.MAX_AT_ONCE


@pytest.mark.faults
async def test_what_came_before_the_connection_closed_is_read_and_nothing_after(ends):
    descriptors = ends.link._socket._fds
    for number in range(100):
        ends.engine.send(b"%d" % number)
    time.sleep(0.3)
    ends.relay.stop()
    ends.relay.join(WAIT_S)
    time.sleep(0.1)
    await until(lambda: ends.lost)
    assert ends.lost == ["connection closed"]
    assert ends.steps == [[b"%d" % number] for number in range(100)]
    loop = asyncio.get_running_loop()
    assert not any(loop.remove_reader(one) for one in descriptors)


@pytest.mark.faults
async def test_the_end_of_an_engines_process_loses_the_link(ends):
    """It had no time for a last word."""
    process = await asyncio.create_subprocess_exec("sleep", "60")
    ends.relay.watch_processes([os.pidfd_open(process.pid)])
    await asyncio.sleep(2 * token_channel.HEARTBEAT_S)
    assert not ends.lost
    process.kill()
    await until(lambda: ends.lost)
    assert ends.lost == ["engine died"]
    await process.wait()


@pytest.mark.faults
async def test_silence_loses_the_link(tmp_path, monkeypatch):
    """The connection of a host that vanished stays open for minutes."""
    monkeypatch.setattr(token_link, "LOOK_S", 0.02)
    ends = Ends(tmp_path)
    ends.relay._beat = lambda: None  # type: ignore[method-assign]  # silent
    await until(lambda: ends.lost)
    assert ends.lost == ["silence"]
    ends.close()


async def test_nobody_reads_along_without_the_key(ends):
    """A stranger who knows the address and a front's name hears and says nothing."""
    wrong_key, _ = zmq.curve_keypair()
    stranger = ends.connect(public_key=wrong_key)
    plain = ends.context.socket(zmq.DEALER)
    plain.linger = 0
    plain.identity = FRONT
    plain.connect(ends.relay.offer.address)
    plain.send_multipart((HELLO, b""))
    await asyncio.sleep(0.3)
    num_heard, before = len(ends.heard), len(ends.steps)
    ends.engine.send(b"secret")
    await until(lambda: len(ends.steps) > before)
    assert ends.steps[-1] == [b"secret"]
    assert plain.poll(0) == 0
    assert len(ends.heard) == num_heard == 1
    assert stranger.state == ReplicaState()
    stranger.close("test over")
    plain.close()
