"""Where a front's leases go: by what made-up replicas say (`fake_fleet`)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serving.front import lease_holder, routing
from serving.front.in_flight import InFlight
from serving.front.routing import Routing
from tests.front.fake_fleet import FakeReplica, Scene, make_request, until

pytestmark = pytest.mark.anyio

COSTS = {"base_ms": 10.0, "request_ms": 1.0, "prompt_token_ms": 0.1}


class Routed:
    """Replicas that Serve names, and a client that counts why each was chosen."""

    def __init__(self, scene: Scene, *names: str) -> None:
        self.scene = scene
        self.running: set[str] = set()
        self.replicas: dict[str, FakeReplica] = {}
        for name in names:
            self.add(name)
        self.reasons: Counter[str] = Counter()
        scene.replace_client(b"routed", running_ids=lambda: self.running)
        scene.client.routing.on_choice = lambda one: self.reasons.update([one])

    def add(self, name: str, **options: Any) -> FakeReplica:
        """Add a replica that Serve lists."""
        replica = self.scene.add_replica(serve_id=name, **options)
        replica.costs = COSTS
        self.replicas[name] = replica
        self.running.add(name)
        return replica

    async def connect(self) -> None:
        """Have every replica connected and heard, and nothing on its way."""
        for number in range(len(self.replicas)):
            await self.scene.client.add_request_async(make_request(f"connect {number}"))
            await until(lambda n=number: self.scene.client.num_links > n)
        names = {f"connect {number}" for number in range(len(self.replicas))}
        await until(lambda: names <= self.scene.reasons.keys())
        links = self.scene.client.routing._links.all
        await until(
            lambda: all(
                link.state.base_ms and not link.load.num_requests for link in links
            )
        )
        for replica in self.replicas.values():
            replica.taken.clear()
        self.reasons.clear()

    def taken(self) -> dict[str, int]:
        return {name: len(one.taken) for name, one in self.replicas.items()}

    async def send(self, count: int, name: str = "s") -> dict[str, int]:
        """Send so many, and return who took them and what was taken before."""
        wanted = count + sum(self.taken().values())
        for n in range(count):
            await self.scene.client.add_request_async(make_request(f"{name}{n}"))
        await until(lambda: sum(self.taken().values()) == wanted)
        return self.taken()


async def test_every_running_replica_is_connected_to_and_gets_its_part_of_a_burst(
    scene,
):
    routed = Routed(scene, "a", "b")
    assert await routed.send(2) == {"a": 1, "b": 1}
    assert routed.reasons == {"new": 2}
    await routed.connect()
    # Before any has answered.
    assert min((await routed.send(8)).values()) >= 3
    assert set(routed.reasons) <= {"gain", "only"}


async def test_the_worse_replica_gets_less(scene):
    """Its cores have a neighbour, and its drafts are refused."""
    routed = Routed(scene, "worse", "better")
    routed.replicas["better"].costs = {**COSTS, "tokens_per_step": 3.0}
    routed.replicas["worse"].costs = {name: 2 * cost for name, cost in COSTS.items()}
    await routed.connect()
    for replica in routed.replicas.values():
        replica.is_held = True
    taken = await routed.send(16)
    assert taken["better"] > 2 * taken["worse"]


async def test_a_known_beginning_goes_where_it_was_computed(scene):
    routed = Routed(scene, *"abcdefgh")
    for replica in routed.replicas.values():
        # So dear that a message that is late by a request decides nothing.
        replica.costs = {**COSTS, "prompt_token_ms": 1.0}
    await routed.connect()
    prompt = range(1, 2_001)
    for n in range(9):
        request = make_request(f"again {n}", prompt=[*prompt, 5, n])
        await scene.client.add_request_async(request)
        await until(lambda: request.request_id in scene.reasons)  # noqa: B023
    assert max(routed.taken().values()) == 9


@pytest.mark.faults
@pytest.mark.parametrize("reason", ["stale", "full"])
async def test_without_state_or_room_the_front_goes_by_its_own_count(
    reason, scene, monkeypatch
):
    """What it has in flight it knows by itself; Serve knows no more than that."""
    routed = Routed(scene, "a", "b")
    await routed.connect()
    for replica in routed.replicas.values():
        replica.is_held = True
    routed.running.remove("b")
    assert (await routed.send(4))["a"] == 4
    routed.running.add("b")
    routed.reasons.clear()
    if reason == "stale":
        monkeypatch.setattr(routing, "MAX_STATE_AGE_S", -1.0)
    else:
        monkeypatch.setattr(Routing, "_describe", lambda *_: None)
    assert await routed.send(6, "later") == {"a": 5, "b": 5}
    assert routed.reasons == {reason: 6}


async def test_a_request_that_ends_before_it_was_said_to_be_there_leaves_nothing(scene):
    """Tokens are faster than Serve: of a reply of one token the end may come first."""
    routed = Routed(scene, "a")
    await routed.connect()
    (link,) = scene.client.routing._links.all
    one = InFlight(make_request("short"))
    scene.client.routing.note_begun(one)
    scene.client.routing.note_settled(one, link)
    assert link.load.num_prompt_tokens == link.load.num_coming == 0


async def test_a_replica_that_drains_gets_nothing_more_and_a_new_one_is_looked_for(
    scene,
):
    """It is connected for as long as its streams go on; Serve lists it no more.

    As many are connected then as run, but not the same.
    """
    routed = Routed(scene, "drains", "stays")
    await routed.connect()
    routed.running.remove("drains")
    assert await routed.send(8) == {"drains": 0, "stays": 8}
    new = routed.add("new")
    await routed.send(4, "later")
    assert new.taken
    assert not routed.replicas["drains"].taken


async def test_the_only_replica_may_be_replaced_while_it_drains(scene):
    """What it holds keeps nobody from going to the new one."""
    routed = Routed(scene)
    old = routed.add("old", num_seats=2)
    await routed.connect()
    old.is_held = True
    await routed.send(3, "holds")
    routed.running.remove("old")
    new = routed.add("new")
    await routed.send(4)
    assert len(new.taken) == 4


@pytest.mark.parametrize("is_dead", [False, True])
async def test_seats_of_a_replica_that_takes_nothing_are_nobodys(is_dead, scene):
    """What is leased for them would wait in the engines of the others.

    It drains; or it has died, and Serve lists it for some seconds.
    """
    routed = Routed(scene, "goes")
    stays = routed.add("stays", num_seats=8)
    await routed.connect()
    stays.is_held = True
    if is_dead:
        routed.replicas["goes"].die()
        await until(lambda: scene.client.num_links == 1)
    else:
        routed.running.remove("goes")
    await scene.send(30)
    await until(lambda: len(stays.running) >= 9)
    await asyncio.sleep(0.3)
    assert len(stays.running) == 9


async def test_what_waits_is_told_to_whom_may_take_it(scene):
    routed = Routed(scene, "drains")
    stays = routed.add("stays", num_seats=4)
    await routed.connect()
    stays.is_held = True
    routed.running.remove("drains")
    for n in range(9):
        await scene.client.add_request_async(make_request(f"w{n}"))
    await until(lambda: len(stays.running) >= 5)
    scene.client.tell_waiting()
    await until(lambda: stays.leases.num_wanted == 9)
    assert not routed.replicas["drains"].leases.num_wanted


async def test_a_replica_that_takes_nothing_is_not_looked_for_again_at_once(scene):
    routed = Routed(scene, "a", "b")
    routed.replicas["b"].die()
    assert await routed.send(6) == {"a": 6, "b": 0}
    assert routed.reasons["new"] == 2


@pytest.mark.faults
async def test_a_replica_whose_host_has_vanished_keeps_no_request(scene, monkeypatch):
    """Serve goes on naming it, and no call to it ever fails."""
    monkeypatch.setattr(lease_holder, "PATIENCE_S", 0.05)
    routed = Routed(scene, "gone", "stays")

    async def say_nothing(*_: Any, **__: Any) -> AsyncIterator[tuple[str, bytes]]:
        await asyncio.Event().wait()
        yield "", b""

    routed.replicas["gone"].leases.hold = say_nothing  # type: ignore[method-assign]
    assert await routed.send(6) == {"gone": 0, "stays": 6}


async def test_requests_that_are_gone_before_their_lease_began_block_nothing(scene):
    """A task that is cancelled before its first step never runs at all."""
    scene.add_replica()
    for n in range(20):
        await scene.client.add_request_async(make_request(f"gone {n}"))
        await scene.client.abort_requests_async([f"gone {n}"])
    request = make_request("stays")
    await scene.client.add_request_async(request)
    await scene.check_all([request])
    await asyncio.sleep(0)


async def test_a_replica_that_one_request_has_for_itself_draws_no_others(scene):
    routed = Routed(scene, "reserved", "other")
    await routed.connect()
    reserved, other = routed.replicas.values()
    reserved.is_held = other.is_held = True
    await routed.scene.client.add_request_async(make_request("before"))
    await until(lambda: reserved.running or other.running)
    if other.running:
        reserved, other = other, reserved
    scene.fleet._turn = scene.fleet.replicas.index(reserved) - 1
    suspect = scene.send_suspect()
    await until(lambda: reserved.leases._lone)
    # So that it is not the one with fewer.
    other.num_others = 4
    link = scene.client.routing._links.find(other.relay.offer.replica)
    await until(lambda: link.load.num_requests == other.num_others)
    requests = [make_request(f"after {n}") for n in range(4)]
    for request in requests:
        await scene.client.add_request_async(request)
    async with asyncio.timeout(1):
        await until(lambda: len(other.running) == len(requests))
    reserved.is_held = other.is_held = False
    await scene.check_all([*requests, suspect])
