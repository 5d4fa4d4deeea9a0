"""Leases that go on with the next request; engines are made up (`fake_fleet`)."""

import asyncio
import time

import msgspec
import pytest

from serving.front import spare_leases
from serving.front.token_links import TokenLinks
from serving.replica.token_channel import ENDED, KEPT, NEXT
from tests.front.fake_fleet import NUM_SLOTS, FakeReplica, until

pytestmark = pytest.mark.anyio

FRONT = b"a front"


def seat_of(replica: FakeReplica, front: bytes = FRONT):
    return replica.leases._seats.find(front)


async def keep(scene, replica, count: int = 1, name: str = "first ") -> None:
    """Leave so many leases without a request."""
    await scene.check_all(await scene.send(count, name))
    await until(lambda: len(seat_of(replica).spares) == count)


async def test_requests_one_after_the_other_take_one_call(scene):
    replica = scene.add_replica()
    for n in range(5):
        await scene.check_all(await scene.send(1, f"{n} "))
    assert len(replica.taken) == 5
    assert len(scene.fleet.opened) == 1
    assert not scene.replays
    assert not replica.aborted
    await until(lambda: not replica.leases.num_running)


async def test_what_waits_takes_the_leases_of_what_has_ended(scene):
    replica = scene.add_replica(num_seats=8)
    await scene.check_all(await scene.send(60))
    # Eight, and the one that is leased beyond the seats.
    assert len(scene.fleet.opened) == 9
    assert len(replica.taken) == 60


async def test_the_next_request_has_its_own_id_and_may_be_given_up(scene):
    replica = scene.add_replica()
    await keep(scene, replica)
    await scene.begin(1, max_tokens=10_000)
    assert list(seat_of(replica).leases) == ["r0"]
    await scene.client.abort_requests_async(["r0"])
    await until(lambda: replica.aborted == ["r0"])
    await until(lambda: not seat_of(replica).leases)
    assert not seat_of(replica).spares
    assert len(scene.fleet.opened) == 1


async def test_a_lease_that_nobody_wants_ends_after_a_moment(scene, monkeypatch):
    replica = scene.add_replica()
    await keep(scene, replica, 3)
    scene.client.fail_overdue()
    (kept,) = scene.client._spares._kept.values()
    assert len(kept) == 3
    assert len(seat_of(replica).spares) == 3
    monkeypatch.setattr(spare_leases, "KEEP_S", 0.0)
    scene.client.fail_overdue()
    await until(lambda: not seat_of(replica).spares)
    num_opened = len(scene.fleet.opened)
    await scene.check_all(await scene.send(1))
    assert len(scene.fleet.opened) == num_opened + 1


async def test_a_lease_whose_link_cannot_be_opened_is_given_back(scene, monkeypatch):
    scene.add_replica()
    with monkeypatch.context() as patch:
        failed = asyncio.Event()

        def fail(*_):
            failed.set()
            raise OSError("no such peer")

        patch.setattr(TokenLinks, "open", fail)
        requests = await scene.send(1)
        await failed.wait()
    await scene.check_all(requests)
    assert scene.fleet.opened[0].is_cancelled
    assert not scene.replays


async def test_a_replica_that_drains_is_kept_from_it_by_nothing(scene):
    running = {"old"}
    scene.replace_client(FRONT, running_ids=lambda: running)
    old = scene.add_replica(serve_id="old")
    await keep(scene, old, 2)
    late = await scene.begin(1, max_tokens=300)
    # As if it were the only one: the next one has not started yet.
    running.clear()
    scene.fleet.replicas.remove(old)
    waiting = await scene.send(3, "new ")
    scene.client.fail_overdue()
    await until(lambda: not seat_of(old).spares)
    running.add("new")
    new = scene.add_replica(serve_id="new")
    await scene.check_all(waiting)
    await scene.check_all(late)
    await until(lambda: not seat_of(old).leases)
    assert not seat_of(old).spares
    assert len(old.taken) == 3
    assert len(new.taken) == 3


async def test_a_front_keeps_no_more_than_its_part(scene):
    replica = scene.add_replica(num_seats=8)
    await scene.add_front()
    await scene.check_all(await scene.send(8, "many "))
    await until(lambda: not seat_of(replica).leases)
    assert len(seat_of(replica).spares) == 5


async def test_a_lone_request_refuses_what_is_handed_over_and_nothing_is_replayed(
    scene,
):
    replica = scene.add_replica()
    await keep(scene, replica, 2)
    replica.is_held = True
    suspect = scene.send_suspect()
    await until(lambda: replica.leases._lone)
    requests = await scene.send(2)
    # What is refused ends its lease.
    await until(lambda: not seat_of(replica).spares)
    assert [one.request_id for one in replica.taken[2:]] == ["suspect"]
    replica.is_held = False
    await scene.check_all([suspect, *requests])
    assert not scene.replays
    # It is not for others to go on with.
    assert "suspect" not in seat_of(replica).spares


@pytest.mark.faults
async def test_requests_in_leases_of_others_go_on_when_their_replica_dies(scene):
    victim = scene.add_replica()
    await keep(scene, victim, 4)
    requests = await scene.begin(2)
    victim.die()
    scene.fleet.replicas.remove(victim)
    other = scene.add_replica()
    await scene.check_all(requests)
    assert len(scene.replays) == 2
    assert {one.request_id for one in other.taken} == {"r0~1", "r1~1"}


@pytest.mark.faults
async def test_a_handover_to_a_replica_that_has_just_died_is_made_up_for(scene):
    """Nothing answers it: the front hears of the death, by its link or its call."""
    victim = scene.add_replica()
    await keep(scene, victim, 2)
    victim.die()
    await asyncio.to_thread(victim.relay.join, 5)
    requests = await scene.send(2)
    scene.fleet.replicas.remove(victim)
    scene.add_replica()
    await scene.check_all(requests)


async def test_what_no_engine_can_read_ends_its_lease_alone(scene):
    replica = scene.add_replica()
    await keep(scene, replica, 2)
    first, second = seat_of(replica).spares
    junk = msgspec.msgpack.encode((first, [b"\xc1"]))
    replica.leases.hear(FRONT, NEXT, junk)
    await until(lambda: list(seat_of(replica).spares) == [second])
    # Nor does a name that is none, or one that has gone, or a lease kept twice.
    replica.leases.hear(FRONT, NEXT, junk)
    for kind in (KEPT, ENDED):
        replica.leases.hear(FRONT, kind, msgspec.msgpack.encode([first, "none"]))
    assert list(seat_of(replica).spares) == [second]
    (kept,) = scene.client._spares._kept.values()
    await until(lambda: any(lease.is_over for _, lease in kept))
    await scene.check_all(await scene.send(3))
    assert not scene.replays


async def test_an_engine_that_takes_no_next_request_ends_its_lease(scene):
    replica = scene.add_replica()
    await keep(scene, replica)
    add = replica.leases._add

    async def fail(_request):
        replica.leases._add = add
        raise RuntimeError("a fault of the engine's")

    replica.leases._add = fail
    await scene.check_all(await scene.send(1))
    assert len(scene.replays) == 1
    assert len(scene.fleet.opened) == 2


async def test_spares_and_streams_go_with_their_front_and_its_slot_is_free(scene):
    replica = scene.add_replica()
    for n in range(2 * NUM_SLOTS):
        name = b"front %d" % n
        scene.replace_client(name)
        await scene.check_all(await scene.send(2, f"{n} "))
        await until(lambda name=name: len(seat_of(replica, name).spares) == 2)
        await scene.begin(1, name=f"{n} runs ", max_tokens=10_000)
    scene.client.shutdown()
    await until(lambda: not (list(replica.leases._seats) or replica.running))


async def test_a_fuzz_of_short_requests_loses_none(scene):
    """Some are given up, links break, and leases end of age meanwhile."""
    replicas = [scene.add_replica(num_seats=4), scene.add_replica(num_seats=4)]
    until_s = time.monotonic() + 3.0
    wanted, n = [], 0
    while time.monotonic() < until_s:
        n += 1
        requests = await scene.send(3, f"{n} ", max_tokens=1 + n % 7)
        if n % 3 == 0:
            await scene.client.abort_requests_async([requests.pop().request_id])
        if n % 11 == 0:
            for link in list(scene.client._links)[: n % 2 + 1]:
                link.close("gap")
        if n % 5 == 0:
            scene.client.fail_overdue()
        wanted += requests
        await asyncio.sleep(0.003 * (n % 4))
    await scene.check_all(wanted)
    # Fewer calls than requests, although links break all the time.
    assert len(scene.fleet.opened) < len(wanted)
    await until(lambda: not any(one.leases.num_running for one in replicas))


async def test_a_call_that_somebody_else_cancels_loses_no_request(scene):
    """Ray may, if a client leaves for whom it was opened; it is others' by then."""
    replica = scene.add_replica()
    requests = await scene.begin(2, max_tokens=200)
    for lease in seat_of(replica).leases.values():
        lease.ended.cancel()
    await scene.check_all(requests)
    assert scene.replays == 2 * ["lease ended"]
    assert len(replica.taken) == 4
