"""No request is lost: engines and replicas are killed under streams."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import compress

import httpx
import psutil
import pytest

from loadtest.compare.processes import find_processes
from loadtest.storm.cases import FEATURES, PLAIN, Case
from loadtest.storm.streams import Stream, run_streams
from tests.serving.conftest import (
    MODEL,
    START_TIMEOUT_S,
    Server,
    read_logs,
    start_up_command,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

Streams = list[Stream]
# Chats, and what is drawn by chance, are left to `loadtest.storm`.
KINDS = [PLAIN, *(one for one in FEATURES if one not in ("tools", "two answers"))]
CASES = [Case(kind, number) for number, kind in enumerate(KINDS * 2)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two fronts and two replicas, in float32: no token depends on its neighbours."""
    running = start_up_command(
        tmp_path_factory.mktemp("fleet") / "up.log",
        {
            "engine.dtype": "float32",
            # Fewer than there are streams, so that both replicas have some.
            "engine.max_num_seqs": 10,
            "replicas.min": 2,
            "replicas.max": 2,
            "http.fronts.min": 2,
            "http.fronts.max": 2,
        },
    )
    yield running
    running.command.end()


@pytest.fixture(scope="module")
def undisturbed(fleet: Server) -> Streams:
    """What comes when nothing is killed."""
    when_both_are_ready(fleet)
    return run_all(fleet)


def run_all(server: Server, disturb: Callable[[], object] | None = None) -> Streams:
    """Run two streams of each kind at once, and disturb them once all have begun."""
    streams: Streams = []
    asking = run_streams(server.url, MODEL, CASES, len(CASES), streams)
    running = threading.Thread(target=asyncio.run, args=(asking,))
    running.start()

    def all_have_begun() -> bool:
        return len(streams) == len(CASES) and all(one.token_ids for one in streams)

    if disturb is not None:
        wait_until(all_have_begun, 60, period_s=0.01)
        disturb()
    running.join(300)
    return streams


def processes(server: Server, role: str) -> list[psutil.Process]:
    family = find_processes(server.command.process.pid)
    return [process for found, process in family if found == role]


def check_is_gone(victim: psutil.Process, server: Server) -> None:
    """The kernel may need seconds to end a process with much memory."""
    wait_until(lambda: victim not in processes(server, "engine"), 60)


def replays(server: Server) -> float:
    return server.total("ray_tetris_replays_total")


def count_goodbyes(server: Server) -> int:
    """Count the replicas that said in their logs that they end by themselves."""
    return read_logs(server).count("this replica ends, and Serve starts")


def when_both_are_ready(server: Server) -> list[psutil.Process]:
    """Wait for both replicas and warm them up; return their engines.

    Else streams end on the one that is to be killed before they begin on the other.
    """

    def ready() -> list[psutil.Process]:
        engines = processes(server, "engine")
        response = httpx.get(f"{server.url}/health", timeout=60, trust_env=False)
        running = response.json().get("running_replicas", 0)
        return engines if len(engines) == running == 2 else []

    engines = wait_until(ready, START_TIMEOUT_S)
    run_all(server)
    return engines


def check_equal(streams: Streams, undisturbed: Streams) -> None:
    assert [one.error for one in streams] == [None] * len(streams)
    for seen, expected in zip(streams, undisturbed, strict=True):
        assert seen.token_ids == expected.token_ids, seen.case
        assert seen.text == expected.text, seen.case
        assert seen.finish_reasons == expected.finish_reasons, seen.case
        for index, wanted in expected.logprobs.items():
            assert seen.logprobs[index] == pytest.approx(wanted, abs=1e-3), seen.case
        assert seen.num_tokens == sum(map(len, expected.token_ids.values())), seen.case


def kill_under_streams(
    server: Server,
    undisturbed: Streams,
    victim_of: Callable[[psutil.Process], psutil.Process],
) -> psutil.Process:
    """Kill until streams were hit; returns the engine whose streams those were.

    Fronts send more to the faster of two replicas: the other's may have ended already.
    """
    for _ in range(3):
        engine = when_both_are_ready(server)[0]
        before = replays(server)
        check_equal(run_all(server, victim_of(engine).kill), undisturbed)
        deadline_s = time.monotonic() + 10.0
        while time.monotonic() < deadline_s:
            if replays(server) > before:
                return engine
            time.sleep(0.5)
    raise AssertionError("no kill hit a stream")


def test_streams_go_on_when_an_engine_is_killed(fleet, undisturbed):
    """Token for token, as if nothing had happened; nothing is counted twice.

    The replica around it ends too: one that stayed would draw leases as the least
    busy.
    """
    num_gone = count_goodbyes(fleet)
    kill_under_streams(fleet, undisturbed, lambda engine: engine)
    wait_until(lambda: count_goodbyes(fleet) > num_gone, 30)


def test_the_replica_that_takes_its_place_starts_from_what_the_other_has_learnt(fleet):
    when_both_are_ready(fleet)
    name = "ray_tetris_warm_starts_total"
    wait_until(lambda: fleet.total(name, outcome="warm") > 0, 120)


def test_streams_go_on_when_an_engine_hangs(fleet, undisturbed):
    """What it holds, a GPU above all, must be free for the next."""
    victim = when_both_are_ready(fleet)[0]
    check_equal(run_all(fleet, lambda: victim.send_signal(signal.SIGSTOP)), undisturbed)
    check_is_gone(victim, fleet)


def test_streams_go_on_when_a_replica_is_killed(fleet, undisturbed):
    """And its engine does not stay behind."""

    def replica_of(engine: psutil.Process) -> psutil.Process:
        replica = engine.parent()
        assert replica in processes(fleet, "replica")
        return replica

    orphan = kill_under_streams(fleet, undisturbed, replica_of)
    check_is_gone(orphan, fleet)


def test_streams_wait_when_all_engines_are_killed(fleet, undisturbed):
    engines = when_both_are_ready(fleet)

    def kill_all() -> None:
        for engine in engines:
            engine.kill()

    check_equal(run_all(fleet, kill_all), undisturbed)


def test_a_front_that_is_killed_takes_only_its_own_connections(fleet, undisturbed):
    """And nothing of its goes on in the engines."""
    when_both_are_ready(fleet)
    fronts = processes(fleet, "front")
    assert len(fronts) == 2
    streams = run_all(fleet, fronts[0].kill)
    whole = [one.is_whole for one in streams]
    assert 0 < sum(whole) < len(streams)
    check_equal([*compress(streams, whole)], [*compress(undisturbed, whole)])
    wait_until(lambda: fleet.total("ray_vllm_num_requests_running") == 0, 60)
    wait_until(lambda: len(processes(fleet, "front")) == 2, START_TIMEOUT_S)
    check_equal(run_all(fleet), undisturbed)


def test_leases_go_where_fronts_want_them(fleet):
    """By what replicas say of their steps; Serve chooses none of a working fleet's."""
    when_both_are_ready(fleet)
    name = "ray_tetris_routed_total"
    wait_until(lambda: fleet.total(name, reason="gain") > 0, 30)
    assert fleet.total(name, reason="new") >= 2
    assert fleet.total(name, reason="stale") == 0


def test_clients_cannot_say_what_only_fronts_may_say(fleet):
    """Tokens that a client claims to have got would be skipped."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4, "temperature": 0}
    claim = {"vllm_xargs": {"tetris_emitted_token_ids": [5, 6]}}
    plain = fleet.post("/v1/completions", json=body).json()
    claimed = fleet.post("/v1/completions", json=body | claim).json()
    assert claimed["choices"][0]["text"] == plain["choices"][0]["text"]
    assert claimed["usage"]["completion_tokens"] == 4
