"""A front's requests over replicas that die; engines are made up (`fake_fleet`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from serving.compat_ray import _RequestContext, _serve_request_context
from serving.engine.compat import FinishReason, GracefulHTTPError
from serving.engine.shared.replay import emitted_token_ids_of
from serving.front import fleet_client
from serving.front.fleet_client import FleetClient
from serving.front.in_flight import MAX_SHARED_DEATHS, InFlight, derive_seed
from serving.replica.engine_gone import EngineGoneError
from tests.front.fake_fleet import (
    NUM_SLOTS,
    FakeFleet,
    FakeReplica,
    expected_ids,
    make_request,
)

WAIT_S = 20.0


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
        self.client = self.make_client(b"a front")
        self._reading = asyncio.create_task(self._read())

    def read_anew(self) -> None:
        """Read from the client there is now."""
        self._reading.cancel()
        self._reading = asyncio.create_task(self._read())

    def make_client(self, name: bytes, **options: Any) -> FleetClient:
        client = FleetClient(
            front=name,
            fingerprint="a model",
            supported_tasks=("generate",),
            open_stream=self.fleet.open_stream,
            **options,
        )
        client.on_failure = self.failures.__setitem__
        client.on_replay = lambda reason, _tokens: self.replays.append(reason)
        return client

    def add_replica(self, **options: Any) -> FakeReplica:
        replica = FakeReplica(self.folder, **options)
        self.fleet.replicas.append(replica)
        return replica

    async def _read(self) -> None:
        while True:
            step = await self.client.get_output_async()
            self.steps.append(step)
            for output in step.outputs:
                self.ids.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason

    async def send(self, count: int, **params: Any) -> list[Any]:
        requests = [make_request(f"r{n}", (n + 1, 7), **params) for n in range(count)]
        for request in requests:
            await self.client.add_request_async(request)
        return requests

    async def send_more(self, count: int) -> list[Any]:
        """Send others, with names of their own."""
        requests = [make_request(f"more {n}") for n in range(count)]
        for request in requests:
            await self.client.add_request_async(request)
        return requests

    async def begun(self, requests: list[Any]) -> None:
        await until(lambda: all(len(self.ids.get(r.request_id, ())) for r in requests))

    async def check_all(self, requests: list[Any]) -> None:
        await until(lambda: all(r.request_id in self.reasons for r in requests))
        for request in requests:
            assert self.ids[request.request_id] == expected_ids(request)
            assert self.reasons[request.request_id] == FinishReason.LENGTH
        assert not self.failures

    async def close(self) -> None:
        self._reading.cancel()
        self.client.shutdown()
        for replica in self.fleet.replicas:
            await replica.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Scene]:
    scene = Scene(folder)
    try:
        yield scene
    finally:
        await scene.close()


def run(play: Callable[[Scene], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        async with staged(folder) as scene:
            await play(scene)

    asyncio.run(main())


def test_every_token_comes_once_and_leases_end_with_their_requests(
    tmp_path: Path,
) -> None:
    async def play(scene: Scene) -> None:
        replicas = [scene.add_replica(), scene.add_replica()]
        await scene.check_all(await scene.send(20))
        assert all(replica.taken for replica in replicas)
        await until(lambda: not any(r.leases.num_running for r in replicas))
        assert not any(replica.aborted for replica in replicas)
        assert not scene.replays

    run(play, tmp_path)


def test_leases_have_their_requests_id_and_outlive_its_call(tmp_path: Path) -> None:
    """Replicas log the client's id; Serve ends no lease because a request has ended."""

    async def play(scene: Scene) -> None:
        call = _RequestContext(request_id="the client's", _internal_request_id="a call")
        _serve_request_context.set(call)
        victim = scene.add_replica()
        requests = await scene.send(1)
        await scene.begun(requests)
        _serve_request_context.set(_RequestContext(request_id="another's"))
        victim.die()
        scene.add_replica()
        await scene.check_all(requests)
        calls = [one.context[_serve_request_context] for one in scene.fleet.opened]
        assert len(calls) > 1
        assert {one.request_id for one in calls} == {"the client's"}
        assert {one._internal_request_id for one in calls} == {""}

    run(play, tmp_path)


def test_requests_go_on_elsewhere_when_a_replica_dies(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        victim, other = scene.add_replica(), scene.add_replica()
        requests = await scene.send(12)
        await scene.begun(requests)
        num_lost = len(victim.running)
        assert num_lost
        victim.die()
        await scene.check_all(requests)
        assert scene.replays == ["connection closed"] * num_lost
        moved = [one for one in other.taken if "~" in one.request_id]
        assert len(moved) == num_lost
        for one in moved:
            emitted = emitted_token_ids_of(one.sampling_params)
            assert emitted == expected_ids(one)[: len(emitted)]
            assert emitted

    run(play, tmp_path)


def test_requests_go_on_elsewhere_when_an_engine_is_shut_down(tmp_path: Path) -> None:
    """It says that it aborts them, which nobody here asked for."""

    async def play(scene: Scene) -> None:
        victim, _ = scene.add_replica(), scene.add_replica()
        requests = await scene.send(8)
        await scene.begun(requests)
        victim.shut_down()
        await scene.check_all(requests)
        assert set(scene.replays) == {"engine is shut down"}

    run(play, tmp_path)


def test_requests_wait_for_the_next_replica_when_all_are_dead(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        victim = scene.add_replica()
        requests = await scene.send(20)
        await scene.begun(requests[:8])
        victim.die()
        await asyncio.sleep(0.2)
        scene.fleet.replicas.clear()
        scene.add_replica()
        await scene.check_all(requests)
        await victim.close()

    run(play, tmp_path)


@pytest.mark.parametrize("error", [EngineGoneError(), EngineDeadError()])
def test_nobody_is_blamed_for_engines_that_were_dead_before(
    error: Exception, tmp_path: Path
) -> None:
    """Serve goes on routing to replicas that have died, and those take nothing."""

    async def play(scene: Scene) -> None:
        scene.fleet.error_of_the_dead = error
        victims = [scene.add_replica(), scene.add_replica()]
        requests = await scene.send(12)
        await scene.begun(requests)
        for victim in victims:
            victim.die()
        num_leases = len(scene.fleet.opened)
        # Each has found both dead, and one of them again.
        await until(lambda: len(scene.fleet.opened) > num_leases + 3 * len(requests))
        scene.fleet.replicas.clear()
        scene.add_replica()
        await scene.check_all(requests)
        for victim in victims:
            await victim.close()

    run(play, tmp_path)


def test_an_engine_must_live_to_be_had_alone(tmp_path: Path) -> None:
    """A request is blamed for the death of an engine it has alone: so not for this."""

    async def play(scene: Scene) -> None:
        dead, other = scene.add_replica(), scene.add_replica()

        async def find_it_dead() -> None:
            dead.die()
            raise EngineGoneError

        dead.leases._flush = find_it_dead
        request = make_request("suspect", (3, 7))
        one = InFlight(request, num_deaths=MAX_SHARED_DEATHS)
        # The next turn is the first replica's.
        scene.fleet._turn = 1
        scene.client._requests.add(one)
        scene.client._queue.add(one)
        await scene.check_all([request])
        assert not dead.taken
        assert other.taken

    run(play, tmp_path)


def test_a_replay_gets_new_noise_and_no_prompt_logprobs_again(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        victim, other = scene.add_replica(), scene.add_replica()
        requests = await scene.send(2, seed=5, temperature=1.0)
        await scene.begun(requests)
        victim.die()
        await scene.check_all(requests)
        (moved,) = [one for one in other.taken if "~" in one.request_id]
        num_emitted = len(emitted_token_ids_of(moved.sampling_params))
        assert moved.sampling_params.seed == derive_seed(5, num_emitted)
        assert moved.sampling_params.seed != 5
        assert all(one.sampling_params.seed == 5 for one in requests)

    run(play, tmp_path)


def test_what_a_lost_engine_still_says_is_ignored(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        first, second = scene.add_replica(), scene.add_replica()
        (request,) = await scene.send(1)
        await scene.begun([request])
        owner = first if first.running else second
        owner.is_held = True
        (link,) = scene.client._links
        link.close("gap")
        await scene.check_all([request])
        await until(lambda: owner.aborted == ["r0"])

    run(play, tmp_path)


def test_times_are_those_of_the_fronts_own_clock(tmp_path: Path) -> None:
    """Durations are taken between them and the front's."""

    async def play(scene: Scene) -> None:
        scene.add_replica()
        began_s = time.monotonic()
        await scene.check_all(await scene.send(1))
        for step in scene.steps:
            assert began_s <= step.timestamp <= time.monotonic()
            for output in step.outputs:
                for event in output.events:
                    assert step.timestamp - event.timestamp == pytest.approx(1, abs=0.1)

    run(play, tmp_path)


def test_an_aborted_request_is_aborted_in_its_engine(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        replica = scene.add_replica()
        requests = await scene.send(2, max_tokens=10_000)
        await scene.begun(requests)
        await scene.client.abort_requests_async(["r0"])
        await until(lambda: replica.aborted == ["r0"])
        await until(lambda: replica.leases.num_running == 1)
        assert list(replica.running) == ["r1"]

    run(play, tmp_path)


def test_an_aborted_request_that_waits_gives_up_its_place(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        requests = await scene.send(20)
        await asyncio.sleep(0.05)
        assert len(scene.fleet.opened) < len(requests)
        await scene.client.abort_requests_async(r.request_id for r in requests)
        await until(lambda: all(one.is_cancelled for one in scene.fleet.opened))
        replica = scene.add_replica()
        (late,) = await scene.send(1)
        await scene.check_all([late])
        assert len(replica.taken) == 1

    run(play, tmp_path)


def test_a_request_that_kills_engines_runs_alone_and_is_then_refused(
    tmp_path: Path,
) -> None:
    """Its neighbours go on; they died with it without guilt."""

    async def play(scene: Scene) -> None:
        poison = 1
        replicas = [scene.add_replica(poison=poison)]

        async def replace_the_dead() -> None:
            while True:
                await asyncio.sleep(0.02)
                if not scene.fleet.replicas[0].is_alive:
                    scene.fleet.replicas[:] = [FakeReplica(tmp_path, poison)]
                    replicas.extend(scene.fleet.replicas)

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
        assert [one.request_id for one in replicas[2].taken][:1] == ["r0~2"] or any(
            one.request_id.startswith("r0~") for one in replicas[2].taken
        )
        with pytest.raises(GracefulHTTPError, match="refused"):
            await scene.client.add_request_async(make_request("again", (poison, 7)))
        replacing.cancel()
        for replica in replicas:
            await replica.close()

    run(play, tmp_path)


def test_a_request_that_is_always_interrupted_fails(tmp_path: Path) -> None:
    """A fault that its own tokens trigger would otherwise go on for ever."""

    async def play(scene: Scene) -> None:
        scene.add_replica()
        requests = await scene.send(1, max_tokens=100_000)
        while not scene.failures:
            for link in scene.client._links:
                link.close("gap")
            await asyncio.sleep(0.005)
        (failure,) = scene.failures.values()
        assert isinstance(failure, GracefulHTTPError)
        assert failure.http_status == 503
        assert len(scene.replays) == fleet_client.MAX_REPLAYS
        assert requests[0].request_id not in scene.reasons

    run(play, tmp_path)


def test_a_full_front_refuses(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        client = scene.make_client(
            b"small", has_room=lambda requests, replicas: requests < replicas + 2
        )
        for n in range(2):
            await client.add_request_async(make_request(f"r{n}"))
        with pytest.raises(GracefulHTTPError, match="queue is full") as refusal:
            await client.add_request_async(make_request("one too many"))
        assert refusal.value.http_status == 503
        client.shutdown()

    run(play, tmp_path)


def test_a_slot_is_free_again_when_its_front_is_gone(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        replica = scene.add_replica()
        for n in range(2 * NUM_SLOTS):
            client = scene.make_client(b"front %d" % n)
            await client.add_request_async(make_request("r", max_tokens=5))
            step = await asyncio.wait_for(client.get_output_async(), WAIT_S)
            assert step.outputs[0].request_id == "r"
            client.shutdown()
            await until(lambda: not replica.leases.num_running)

    run(play, tmp_path)


def test_no_more_is_leased_than_engines_have_seats_for(tmp_path: Path) -> None:
    """What waits in an engine can be overtaken by nothing, a replay least of all."""

    async def play(scene: Scene) -> None:
        replicas = [scene.add_replica(num_seats=8) for _ in range(2)]
        scene.client.credit.num_replicas = 2
        for replica in replicas:
            replica.is_held = True
        requests = await scene.send(60)
        await until(lambda: sum(len(one.running) for one in replicas) == 18)
        await asyncio.sleep(0.1)
        assert [len(one.running) for one in replicas] == [9, 9]
        for replica in replicas:
            replica.is_held = False
        await scene.check_all(requests)

    run(play, tmp_path)


def test_fronts_share_the_seats_there_are(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        replica = scene.add_replica(num_seats=8)
        other = scene.make_client(b"another")
        for client in (scene.client, other):
            await client.add_request_async(make_request(f"first of {id(client)}"))
        await until(lambda: scene.client.num_links == other.num_links == 1)
        links = [*scene.client._links, *other._links]
        await until(lambda: [one.state.num_fronts for one in links] == [2, 2])
        replica.is_held = True
        for n in range(30):
            await scene.client.add_request_async(make_request(f"a{n}"))
            await other.add_request_async(make_request(f"b{n}"))
        await until(lambda: len(replica.running) >= 9)
        await asyncio.sleep(0.1)
        assert 9 <= len(replica.running) <= 10
        other.shutdown()

    run(play, tmp_path)


def test_a_front_that_holds_nothing_may_always_ask(tmp_path: Path) -> None:
    """It would wait for ever, for others or for news of an engine that has none."""

    async def play(scene: Scene) -> None:
        replica = scene.add_replica(num_seats=8)
        replica.num_others = 100
        requests = await scene.send(3)
        await scene.check_all(requests)

    run(play, tmp_path)


def test_a_front_looks_for_replicas_that_it_does_not_know(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.fleet.goes_by_load = True
        full = scene.add_replica(num_seats=8)
        full.is_held = True
        requests = await scene.send(18)
        await until(lambda: len(full.running) == 9)
        new = scene.add_replica(num_seats=8)
        new.is_held = True
        await asyncio.sleep(0.05)
        assert not new.taken
        scene.client.credit.num_replicas = 2
        await until(lambda: len(new.running) == 9)
        assert len(full.running) == 9
        full.is_held = new.is_held = False
        await scene.check_all(requests)

    run(play, tmp_path)


def test_replays_go_before_what_waits_and_as_blocks_are_free(tmp_path: Path) -> None:
    """Of one replica's requests the other cannot take back all at once."""

    async def play(scene: Scene) -> None:
        doomed, other = scene.add_replica(), scene.add_replica()
        requests = await scene.send(30, max_tokens=2000)
        await until(
            lambda: all(len(scene.ids.get(r.request_id, ())) > 20 for r in requests)
        )
        doomed.is_held = other.is_held = True
        await asyncio.sleep(0.1)
        lost = set(doomed.running)
        assert 10 <= len(lost) <= 20
        # Room for two of them at a time.
        other.num_free_kv_tokens = int(2.5 * max(len(scene.ids[name]) for name in lost))
        (link,) = (one for one in scene.client._links if one.offer == other.relay.offer)
        await until(lambda: link.state.num_free_kv_tokens == other.num_free_kv_tokens)
        num_taken = len(other.taken)
        scene.fleet.replicas.remove(doomed)
        await doomed.close()
        late = await scene.send_more(5)
        await until(lambda: len(other.taken) == num_taken + 2)
        await asyncio.sleep(0.3)
        assert len(other.taken) == num_taken + 2
        other.is_held = False
        await until(lambda: len(other.taken) == num_taken + len(lost) + 5)
        names = [one.request_id.split("~")[0] for one in other.taken[num_taken:]]
        assert set(names[:-5]) == lost
        assert names[-5:] == [one.request_id for one in late]

    run(play, tmp_path)


def test_replicas_know_what_waits_for_them(tmp_path: Path) -> None:
    """The autoscaler cannot see a front's queue otherwise."""

    async def play(scene: Scene) -> None:
        replica = scene.add_replica(num_seats=8)
        replica.is_held = True
        requests = await scene.send(30)
        await until(lambda: len(replica.running) == 9)
        scene.client.tell_waiting()
        await until(lambda: replica.leases.num_wanted == 30)
        replica.is_held = False
        await scene.check_all(requests)
        scene.client.tell_waiting()
        await until(lambda: replica.leases.num_wanted == 0)

    run(play, tmp_path)
