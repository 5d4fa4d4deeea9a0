"""What happens when an engine dies; named to run last on the shared deployment."""

import contextlib
import signal
import threading
import time

import openai
import psutil
import pytest

from loadtest.compare.processes import find_processes
from tests.serving.conftest import (
    MODEL,
    START_TIMEOUT_S,
    Server,
    load,
    num_replicas,
    read_logs,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


NUM_STREAMS = 4

HANG_IS_SEEN_WITHIN_S = 60.0
"""Three times `replicas.engine_hang_timeout_s`."""

LEAVES_WITHIN_S = 5.0
"""Less than Serve's own three failed health checks, 2 s apart, take."""


def engine_processes(server: Server) -> set[psutil.Process]:
    family = find_processes(server.command.process.pid)
    return {process for role, process in family if role == "engine"}


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def count_goodbyes(server: Server) -> int:
    """Count the replicas that said in their logs that they end by themselves."""
    return read_logs(server).count("this replica ends, and Serve starts")


def test_requests_that_got_no_answer_from_a_dead_engine_get_it_from_another(
    server: Server,
) -> None:
    with load(server, num_clients=8, max_tokens=60) as statuses:
        wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
        victim = min(engine_processes(server), key=lambda process: process.pid)
        num_before = len(statuses)
        victim.kill()
        wait_until(lambda: len(statuses) >= num_before + 32, 300)
    assert set(statuses) == {200}


def test_a_stream_whose_engine_dies_ends_with_an_error_object(server: Server) -> None:
    """One that says what to do, and nothing of the server's inside."""
    wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
    engines = engine_processes(server)
    begun: list[int] = []
    ends: list[str] = []
    errors: list[openai.APIError] = []

    def read() -> None:
        stream = server.client().completions.create(
            model=MODEL,
            prompt="one two three",
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        try:
            for number, chunk in enumerate(stream):
                if number == 0:
                    begun.append(number)
                end = chunk.choices[0].finish_reason
            ends.append(str(end))
        except openai.APIError as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(NUM_STREAMS)]
    for reader in readers:
        reader.start()
    wait_until(lambda: len(begun) == NUM_STREAMS, 300, period_s=0.01)
    for engine in engines:
        engine.kill()
    for reader in readers:
        reader.join(300)
    assert len(ends) + len(errors) == NUM_STREAMS
    assert set(ends) <= {"length"}
    assert errors
    for error in errors:
        assert error.body == {
            "message": "The engine is not available at the moment; retry.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    wait_until(lambda: len(engine_processes(server) - engines) == 2, START_TIMEOUT_S)
    wait_until(server.is_healthy, START_TIMEOUT_S)


def test_a_hung_engine_is_replaced_and_its_requests_are_answered_by_another(
    server: Server,
) -> None:
    with load(server, num_clients=8, max_tokens=60) as statuses:
        wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
        before = engine_processes(server)
        victim = min(before, key=lambda process: process.pid)
        victim.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: num_replicas(server) == 1, HANG_IS_SEEN_WITHIN_S)
            # What it holds, a GPU above all, must be free for the next.
            wait_until(lambda: not is_alive(victim), 10)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        num_before = len(statuses)
        wait_until(lambda: len(statuses) >= num_before + 16, 300)
    assert set(statuses) == {200}
    wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
    assert len(engine_processes(server) - before) == 1


def test_a_dead_engine_is_replaced_and_its_requests_get_an_error_object(
    server: Server,
) -> None:
    body = {"model": MODEL, "prompt": "one", "max_tokens": 2}
    wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
    before = engine_processes(server)
    victim = min(before, key=lambda process: process.pid)
    replica = victim.parent()
    assert replica is not None
    assert replica.pid != server.command.process.pid
    num_gone = count_goodbyes(server)
    began_s = time.monotonic()
    victim.kill()
    # A replica that stayed would draw requests, as the least busy one.
    wait_until(lambda: not is_alive(replica), 60)
    if time.monotonic() - began_s > LEAVES_WITHIN_S:
        # On a slow machine only its last words tell that Serve did not end it.
        assert count_goodbyes(server) > num_gone

    def serves_again() -> bool:
        response = server.post("/v1/completions", json=body)
        if response.status_code != 200:
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
        engines = engine_processes(server)
        return response.status_code == 200 and len(engines - before) >= 1

    wait_until(serves_again, START_TIMEOUT_S)
