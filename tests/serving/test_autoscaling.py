"""Serve's own autoscaling and limits, seen from outside."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.serving.conftest import MODEL, START_TIMEOUT_S, Server, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def num_replicas(server: Server) -> int:
    health = httpx.get(f"{server.url}/health", timeout=30, trust_env=False)
    return int(health.json()["running_replicas"])


def tokens_by_replica(server: Server) -> dict[str, float]:
    samples = server.samples("ray_vllm_generation_tokens_total")
    return {sample.labels["ReplicaId"]: sample.value for sample in samples}


@contextmanager
def load(
    server: Server, num_clients: int, max_tokens: int = 200
) -> Iterator[list[int]]:
    """Keep clients sending requests; yields the status codes seen so far."""
    stop = threading.Event()
    statuses: list[int] = []
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": max_tokens}

    def send() -> None:
        while not stop.is_set():
            response = server.post("/v1/completions", json=body | {"ignore_eos": True})
            statuses.append(response.status_code)
            if response.status_code == 503:
                assert response.json()["error"]["type"] == "ServiceUnavailableError"
                stop.wait(float(response.headers["retry-after"]))

    threads = [threading.Thread(target=send) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def test_load_starts_a_second_replica_and_both_serve(server: Server) -> None:
    with load(server, num_clients=8) as statuses:
        wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
        before = tokens_by_replica(server)

        def both_have_served() -> bool:
            now = tokens_by_replica(server)
            return len(now) == 2 and all(
                tokens > before.get(replica, 0) for replica, tokens in now.items()
            )

        wait_until(both_have_served, 60)
    assert set(statuses) == {200}


def test_what_exceeds_replicas_and_queue_is_refused_and_may_come_back(
    server: Server,
) -> None:
    # Two replicas hold 8 requests each, and 16 more may wait.
    with load(server, num_clients=48, max_tokens=400) as statuses:
        wait_until(lambda: {200, 503} <= set(statuses), 60)
        assert num_replicas(server) >= 1
    assert set(statuses) == {200, 503}
    body = {"model": MODEL, "prompt": "one", "max_tokens": 2}
    assert server.post("/v1/completions", json=body).status_code == 200
