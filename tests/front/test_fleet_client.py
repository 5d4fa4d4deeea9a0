"""A front's requests over replicas that die; engines are made up (`fake_fleet`)."""

import asyncio
import contextlib
import time

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from serving.compat_ray import _RequestContext, _serve_request_context
from serving.engine.compat import GracefulHTTPError
from serving.engine.shared.replay import emitted_token_ids_of
from serving.front import failover
from serving.front.credit import MAX_UNSETTLED
from serving.front.in_flight import MAX_SHARED_DEATHS, derive_seed
from serving.replica.engine_gone import EngineGoneError
from tests.front.fake_fleet import FakeReplica, expected_ids, make_request, until

pytestmark = pytest.mark.anyio


async def test_leases_have_their_requests_id_and_outlive_its_call(scene):
    """Replicas log the client's id; Serve ends no lease because a request has ended."""
    call = _RequestContext(request_id="the client's", _internal_request_id="a call")
    _serve_request_context.set(call)
    victim = scene.add_replica()
    requests = await scene.begin(1)
    _serve_request_context.set(_RequestContext(request_id="another's"))
    victim.die()
    scene.add_replica()
    await scene.check_all(requests)
    calls = [one.context[_serve_request_context] for one in scene.fleet.opened]
    assert len(calls) > 1
    assert {one.request_id for one in calls} == {"the client's"}
    assert {one._internal_request_id for one in calls} == {""}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (FakeReplica.die, "connection closed"),
        # It says that it aborts them, which nobody here asked for.
        (FakeReplica.shut_down, "engine is shut down"),
    ],
)
async def test_requests_go_on_elsewhere_when_a_replica_ends(end, reason, scene):
    victim, other = scene.add_replica(), scene.add_replica()
    requests = await scene.begin(12)
    num_lost = len(victim.running)
    assert num_lost
    end(victim)
    await scene.check_all(requests)
    assert scene.replays == [reason] * num_lost
    moved = [one for one in other.taken if "~" in one.request_id]
    assert len(moved) == num_lost
    for one in moved:
        emitted = emitted_token_ids_of(one.sampling_params)
        assert emitted
        assert emitted == expected_ids(one)[: len(emitted)]


@pytest.mark.faults
async def test_requests_wait_for_the_next_replica_when_all_are_dead(scene):
    victim = scene.add_replica()
    requests = await scene.begin(8) + await scene.send(12, "waits")
    victim.die()
    await asyncio.sleep(0.2)
    scene.fleet.replicas.clear()
    scene.add_replica()
    await scene.check_all(requests)


@pytest.mark.parametrize("error", [EngineGoneError(), EngineDeadError()])
async def test_nobody_is_blamed_for_engines_that_were_dead_before(error, scene):
    """Serve goes on routing to replicas that have died, and those take nothing."""
    scene.fleet.error_of_the_dead = error
    victims = [scene.add_replica(), scene.add_replica()]
    requests = await scene.begin(12)
    for victim in victims:
        victim.die()
    num_leases = len(scene.fleet.opened)
    # Each has found both dead, and one of them again.
    await until(lambda: len(scene.fleet.opened) > num_leases + 3 * len(requests))
    scene.fleet.replicas.clear()
    scene.add_replica()
    await scene.check_all(requests)


async def test_an_engine_must_live_to_be_had_alone(scene):
    """A request is blamed for the death of an engine it has alone: so not for this."""
    dead, other = scene.add_replica(), scene.add_replica()

    async def find_it_dead() -> None:
        dead.die()
        raise EngineGoneError

    dead.leases._flush = find_it_dead
    # The next turn is the first replica's.
    scene.fleet._turn = 1
    await scene.check_all([scene.send_suspect()])
    assert not dead.taken
    assert other.taken


async def test_a_lone_request_is_given_up_when_its_link_breaks_while_it_waits(scene):
    """Its slot may be another's by then, and nobody would hear that it has ended."""
    replica = scene.add_replica()
    other = scene.make_client(b"another")
    await other.add_request_async(make_request("keeps it waiting", max_tokens=100))
    await until(lambda: replica.running)
    replica.is_held = True
    suspect = scene.send_suspect()
    await until(lambda: replica.leases._lone)
    (link,) = scene.client._links
    link.close("gap")
    await until(lambda: replica.leases._seats.find(b"a front") is None)
    replica.is_held = False
    await scene.check_all([suspect])
    await until(lambda: replica.leases._lone is None)
    assert not replica.leases.num_running


@pytest.mark.faults
async def test_a_lease_ends_with_its_link_though_it_says_nothing_more(scene):
    """As when a host vanishes between its offer and its word that it accepts."""
    vanished = scene.add_replica()
    hold = vanished.leases.hold

    async def only_offer(*args, **options):
        async with contextlib.aclosing(hold(*args, **options)) as holding:
            async for event in holding:
                yield event
                await asyncio.Event().wait()

    vanished.leases.hold = only_offer
    # A second one would find the front connected, and be accepted at once.
    requests = await scene.send(1)
    await until(lambda: scene.client.num_links)
    scene.fleet.replicas.clear()
    scene.add_replica()
    (link,) = scene.client._links
    link.close("silence")
    await scene.check_all(requests)
    assert not scene.replays


async def test_a_replay_gets_new_noise_and_no_prompt_logprobs_again(scene):
    victim, other = scene.add_replica(), scene.add_replica()
    requests = await scene.begin(2, seed=5, temperature=1.0)
    victim.die()
    await scene.check_all(requests)
    (moved,) = [one for one in other.taken if "~" in one.request_id]
    num_emitted = len(emitted_token_ids_of(moved.sampling_params))
    assert moved.sampling_params.seed == derive_seed(5, num_emitted)
    assert moved.sampling_params.seed != 5
    assert all(one.sampling_params.seed == 5 for one in requests)


async def test_what_a_lost_engine_still_says_is_ignored(scene):
    first, second = scene.add_replica(), scene.add_replica()
    (request,) = await scene.begin(1)
    owner = first if first.running else second
    owner.is_held = True
    (link,) = scene.client._links
    link.close("gap")
    await scene.check_all([request])
    await until(lambda: owner.aborted == ["r0"])


async def test_every_token_comes_once_by_the_fronts_own_clock_and_leases_end(scene):
    """Durations are taken between times of tokens and the front's own."""
    replicas = [scene.add_replica(), scene.add_replica()]
    began_s = time.monotonic()
    await scene.check_all(await scene.send(20))
    assert all(replica.taken for replica in replicas)
    await until(lambda: not any(r.leases.num_running for r in replicas))
    assert not any(replica.aborted for replica in replicas)
    assert not scene.replays
    for step in scene.steps:
        assert began_s <= step.timestamp <= time.monotonic()
        for output in step.outputs:
            for event in output.events or ():
                assert step.timestamp - event.timestamp == pytest.approx(1, abs=0.5)


async def test_aborted_requests_give_up_their_place_and_leave_their_engine(scene):
    waiting = await scene.send(20, "waits")
    await asyncio.sleep(0.05)
    assert len(scene.fleet.opened) < len(waiting)
    await scene.client.abort_requests_async(one.request_id for one in waiting)
    await until(lambda: all(one.is_cancelled for one in scene.fleet.opened))
    replica = scene.add_replica()
    await scene.begin(2, max_tokens=10_000)
    await scene.client.abort_requests_async(["r0"])
    await until(lambda: replica.aborted == ["r0"])
    await until(lambda: replica.leases.num_running == 1)
    assert list(replica.running) == ["r1"]
    assert len(replica.taken) == 2


@pytest.mark.faults
async def test_a_request_that_kills_engines_runs_alone_and_is_then_refused(scene):
    """Its neighbours go on; they died with it without guilt."""
    poison = 1
    replicas = [scene.add_replica(poison=poison)]

    async def replace_the_dead() -> None:
        while True:
            await asyncio.sleep(0.02)
            if not scene.fleet.replicas[0].is_alive:
                scene.fleet.replicas.clear()
                replicas.append(scene.add_replica(poison=poison))

    replacing = asyncio.create_task(replace_the_dead())
    requests = await scene.send(6)
    guilty, neighbours = requests[0], requests[1:]
    await until(lambda: scene.failures)
    (failure,) = scene.failures.items()
    assert failure[0] == guilty.request_id
    assert isinstance(failure[1], GracefulHTTPError)
    assert failure[1].http_status == 400
    scene.failures.clear()
    await scene.check_all(neighbours)
    # The third engine it killed had nothing else to do.
    assert len([r for r in replicas if not r.is_alive]) == 3
    assert any(one.request_id.startswith("r0~") for one in replicas[2].taken)
    with pytest.raises(GracefulHTTPError, match="refused"):
        await scene.client.add_request_async(make_request("again", (poison, 7)))
    replacing.cancel()


async def test_a_request_that_is_always_interrupted_fails(scene, monkeypatch):
    """A fault that its own tokens trigger would otherwise go on for ever."""
    monkeypatch.setattr(failover, "MAX_REPLAYS", 3)
    scene.add_replica()
    requests = await scene.send(1, max_tokens=100_000)
    while not scene.failures:
        if not scene.client.num_unplaced:
            for link in scene.client._links:
                link.close("gap")
        await asyncio.sleep(0.005)
    (failure,) = scene.failures.values()
    assert isinstance(failure, GracefulHTTPError)
    assert failure.http_status == 503
    assert len(scene.replays) == failover.MAX_REPLAYS
    assert requests[0].request_id not in scene.reasons


async def test_a_request_that_cannot_be_leased_fails_at_once_and_keeps_no_place(
    scene, monkeypatch, serve_log
):
    async def fail(*_):
        raise RuntimeError("a fault of ours")

    scene.add_replica()
    # MessagePack has numbers of 64 bits.
    await scene.client.add_request_async(make_request("big", top_k=2**70))
    await until(lambda: scene.failures)
    with monkeypatch.context() as patch:
        patch.setattr(scene.client._leases, "_hold", fail)
        await scene.client.add_request_async(make_request("unlucky"))
        await until(lambda: len(scene.failures) == 2)
    statuses = {name: one.http_status for name, one in scene.failures.items()}
    assert statuses == {"big": 400, "unlucky": 500}
    assert "a fault of ours" in serve_log.text
    assert scene.client.admission._places.num_taken == 0
    scene.failures.clear()
    await scene.check_all(await scene.send(2))


async def test_fronts_share_the_seats_there_are(scene):
    replica = scene.add_replica(num_seats=8)
    other = await scene.add_front()
    replica.is_held = True
    for n in range(30):
        await scene.client.add_request_async(make_request(f"a{n}"))
        await other.add_request_async(make_request(f"b{n}"))
    await until(lambda: len(replica.running) >= 9)
    await asyncio.sleep(0.1)
    # A message under way knows nothing of what was leased meanwhile: each may take its
    # part once more. Each alone would take nine.
    assert 9 <= len(replica.running) <= 14


async def test_a_front_that_holds_nothing_may_always_ask(scene):
    """It would wait for ever, for others or for news of an engine that has none."""
    replica = scene.add_replica(num_seats=8)
    replica.num_others = 100
    requests = await scene.send(3)
    await scene.check_all(requests)


async def test_replays_go_before_what_waits_and_as_blocks_are_free(scene):
    """Of one replica's requests the other cannot take back all at once."""
    doomed, other = scene.add_replica(), scene.add_replica()
    requests = await scene.send(30, max_tokens=2000)
    await until(
        lambda: all(len(scene.ids.get(r.request_id, ())) > 20 for r in requests)
    )
    doomed.is_held = other.is_held = True
    await asyncio.sleep(0.1)
    # A prompt has two tokens. Those that began first are longest.
    lost = {name: 2 + num_out for name, (_, num_out) in doomed.running.items()}
    assert 10 <= len(lost) <= 20
    # Room for at least two of them at a time.
    free = int(2.5 * max(lost.values()))
    other.num_free_kv_tokens = free
    (link,) = (one for one in scene.client._links if one.offer == other.relay.offer)
    await until(lambda: link.state.num_free_kv_tokens == free)
    num_taken = len(other.taken)
    scene.fleet.replicas.remove(doomed)
    await doomed.close()
    # Before the front has heard of it there is nothing that could go first.
    await until(lambda: len(scene.replays) == len(lost))
    late = await scene.send(5, "more ")
    await until(lambda: len(other.taken) >= num_taken + 2)
    await asyncio.sleep(0.3)
    at_once = [emitted_token_ids_of(r.sampling_params) for r in other.taken[num_taken:]]
    num_tokens = sum(2 + len(emitted) for emitted in at_once)
    assert num_tokens <= free < num_tokens + max(lost.values())
    assert len(at_once) < len(lost)
    other.is_held = False
    await until(lambda: len(other.taken) == num_taken + len(lost) + 5)
    names = [one.request_id.split("~")[0] for one in other.taken[num_taken:]]
    later = {one.request_id for one in late}
    assert set(names) == set(lost) | later
    # Only leases that are on their way together overtake one another.
    assert later.isdisjoint(names[: len(lost) - MAX_UNSETTLED + 1])


async def test_no_more_is_leased_than_seats_and_a_new_replica_is_looked_for(scene):
    """What waits in an engine can be overtaken by nothing, a replay least of all.

    Replicas are told what waits: the autoscaler cannot see a front's queue otherwise.
    """
    running = {"full"}
    scene.replace_client(b"a front", running_ids=lambda: running)
    full = scene.add_replica(num_seats=8, serve_id="full")
    full.is_held = True
    requests = await scene.send(60)
    await until(lambda: len(full.running) == 9)
    scene.client.tell_waiting()
    await until(lambda: full.leases.num_wanted == 60)
    new = scene.add_replica(num_seats=8, serve_id="new")
    new.is_held = True
    await asyncio.sleep(0.05)
    assert not new.taken
    running.add("new")
    await until(lambda: len(new.running) == 9)
    await asyncio.sleep(0.05)
    assert [len(full.running), len(new.running)] == [9, 9]
    full.is_held = new.is_held = False
    await scene.check_all(requests)
    scene.client.tell_waiting()
    await until(lambda: full.leases.num_wanted == 0)


async def test_a_replica_that_is_ended_by_its_drain_has_not_died_of_its_requests(scene):
    running = {"0"}
    scene.replace_client(b"a front", running_ids=lambda: running)
    replica = scene.add_replica(serve_id="0")
    requests = await scene.begin(1, max_tokens=300)
    for number in range(1, MAX_SHARED_DEATHS + 2):
        replica.is_held = True
        running.clear()
        running.add(f"{number}")
        following = scene.add_replica(serve_id=f"{number}")
        scene.fleet.replicas.remove(replica)
        await replica.close()
        await until(lambda one=following: one.taken)
        replica = following
    await scene.check_all(requests)
    assert scene.replays == ["connection closed"] * (MAX_SHARED_DEATHS + 1)
    assert not any(alone for _, _, _, alone in (s._args for s in scene.fleet.opened))


async def test_an_engine_dies_once_though_its_replica_still_takes_leases(scene):
    running = {"dead"}
    scene.replace_client(b"a front", running_ids=lambda: running)
    dead = scene.add_replica(serve_id="dead")
    requests = await scene.begin(2, max_tokens=300)
    dead.is_held, dead.costs = True, {"is_alive": False}
    # Its actor takes a while to see it, and Serve to see that it has ended.
    await until(lambda: len(scene.fleet.opened) >= 3 * len(requests))
    other = scene.add_replica(serve_id="other")
    running.add("other")
    await until(lambda: other.taken)
    running.remove("dead")
    await scene.check_all(requests)
    assert scene.replays == ["engine died"] * len(requests)
    assert not any(alone for _, _, _, alone in (s._args for s in scene.fleet.opened))
