"""No request is lost: engines, replicas and a front are killed under streams."""

import contextlib
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from itertools import compress

import psutil
import pytest

from tests.serving.conftest import (
    MODEL,
    START_TIMEOUT_S,
    Server,
    read_logs,
    wait_until,
)
from tests.serving.fleet import (
    CASES,
    check_equal,
    processes,
    run_all,
    when_both_are_ready,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REPLAYS = "ray_tetris_replays_total"


def check_is_gone(victim: psutil.Process, server: Server) -> None:
    """The kernel may need seconds to end a process with much memory."""
    wait_until(lambda: victim not in processes(server, "engine"), 60)


def count_goodbyes(server: Server) -> int:
    return read_logs(server).count("this replica ends, and Serve starts")


@pytest.mark.faults
def test_streams_go_on_when_an_engine_is_killed(fleet, undisturbed):
    """Token for token, as if nothing had happened; nothing is counted twice.

    The replica around it ends too: one that stayed would draw leases as the least
    busy.
    """
    num_gone = count_goodbyes(fleet)

    def hits_streams() -> bool:
        engine, before = when_both_are_ready(fleet)[0], fleet.total(REPLAYS)
        check_equal(run_all(fleet, engine.kill), undisturbed)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: fleet.total(REPLAYS) > before, 10)
        return fleet.total(REPLAYS) > before

    # Fronts send more to the faster of two replicas: the other's may have ended by now.
    assert any(hits_streams() for _ in range(3))
    wait_until(lambda: count_goodbyes(fleet) > num_gone, 120)


@pytest.mark.faults
def test_streams_go_on_when_an_engine_hangs(fleet, undisturbed):
    """What it holds, a GPU above all, must be free for the next."""
    victim = when_both_are_ready(fleet)[0]
    check_equal(run_all(fleet, lambda: victim.send_signal(signal.SIGSTOP)), undisturbed)
    check_is_gone(victim, fleet)


@pytest.mark.faults
def test_streams_wait_when_an_engine_and_the_other_s_replica_are_killed(
    fleet, undisturbed
):
    """And the engine of that replica does not stay behind."""
    engine, orphan = when_both_are_ready(fleet)
    replica = orphan.parent()
    assert replica in processes(fleet, "replica")
    streams = run_all(fleet, lambda: (replica.kill(), engine.kill()))
    check_equal(streams, undisturbed)
    check_is_gone(orphan, fleet)


@pytest.mark.faults
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


def ask_in_one_piece(server: Server, max_tokens: int) -> tuple[int, int]:
    """Return the status of an answer that comes at once, and how many tokens it has."""
    body = {"model": MODEL, "prompt": "one two", "max_tokens": max_tokens}
    content = json.dumps(body | {"ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {server.key}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 120) as connection:
        connection.sendall(head.encode() + content)
        answer = HTTPResponse(connection)
        answer.begin()
        told = json.loads(answer.read() or "{}")
        return answer.status, told.get("usage", {}).get("completion_tokens", 0)


@pytest.mark.faults
def test_what_a_killed_front_has_not_begun_to_answer_another_answers(fleet):
    """HAProxy asks it; of an answer that comes at once nothing comes before its end."""
    when_both_are_ready(fleet)
    fronts = processes(fleet, "front")
    assert len(fronts) == 2
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask_in_one_piece, fleet, 300) for _ in range(12)]
        # Any moment will do; what fronts have, their metrics tell too late.
        time.sleep(0.5)
        fronts[0].kill()
        # To a front that has just gone, too.
        asked += [pool.submit(ask_in_one_piece, fleet, 4) for _ in range(8)]
        answers = [one.result() for one in asked]
    assert answers == [(200, 300)] * 12 + [(200, 4)] * 8
    wait_until(lambda: len(processes(fleet, "front")) == 2, START_TIMEOUT_S)


def test_leases_go_where_fronts_want_them(fleet):
    """By what replicas say of their steps; Serve chooses none of a working fleet's."""
    when_both_are_ready(fleet)
    name = "ray_tetris_routed_total"
    wait_until(lambda: fleet.total(name, reason="gain") > 0, 30)
    assert fleet.total(name, reason="new") >= 2
    num_gain, num_stale = (fleet.total(name, reason=one) for one in ("gain", "stale"))
    run_all(fleet)
    wait_until(lambda: fleet.total(name, reason="gain") > num_gain, 60)
    # A machine that stands still for seconds makes states stale.
    assert fleet.total(name, reason="stale") - num_stale < len(CASES) / 2


def test_the_replica_that_takes_its_place_starts_from_what_the_other_has_learnt(fleet):
    """Each of those above, unless the one it asked was too busy to answer in time."""
    name = "ray_tetris_warm_starts_total"
    wait_until(lambda: fleet.total(name, outcome="warm") > 0, START_TIMEOUT_S)
