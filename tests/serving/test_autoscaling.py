"""Serve's own autoscaling and limits, seen from outside."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving.conftest import (
    MODEL,
    START_TIMEOUT_S,
    Server,
    load,
    start_up_command,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def num_replicas(server: Server) -> int:
    """Return the running engine replicas, as the server counts them."""
    health = httpx.get(f"{server.url}/health", timeout=60, trust_env=False)
    return int(health.json()["running_replicas"])


def steps_by_replica(server: Server) -> dict[str, float]:
    samples = server.samples("ray_tetris_engine_steps_total")
    return {sample.labels["replica"]: sample.value for sample in samples}


def test_load_starts_a_second_replica_and_both_serve(server):
    with load(server, num_clients=8) as statuses:
        wait_until(lambda: num_replicas(server) == 2, START_TIMEOUT_S)
        before = steps_by_replica(server)

        def both_have_served() -> bool:
            now = steps_by_replica(server)
            return len(now) == 2 and all(
                steps > before.get(replica, 0) for replica, steps in now.items()
            )

        wait_until(both_have_served, 300)
    assert set(statuses) == {200}


def test_what_exceeds_replicas_and_queue_is_refused_and_may_come_back(server):
    # Two replicas hold 8 requests each, and 16 more may wait.
    with load(server, num_clients=48, max_tokens=400) as statuses:
        wait_until(lambda: {200, 503} <= set(statuses), 300)
    assert set(statuses) == {200, 503}
    body = {"model": MODEL, "prompt": "one", "max_tokens": 2}
    assert server.post("/v1/completions", json=body).status_code == 200


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory):
    """A deployment that keeps no replica when idle."""
    running = start_up_command(
        tmp_path_factory.mktemp("sleeper") / "up.log",
        {
            "replicas.min": 0,
            "replicas.max": 1,
            "replicas.downscale_delay_s": 1,
            "http.access.allow_anonymous": "true",
        },
    )
    yield running
    running.command.end()


def test_an_idle_deployment_keeps_none_and_requests_wait_for_one(sleeper):
    """And `/health` stays well: nothing is broken."""
    body = {"model": MODEL, "prompt": "one", "max_tokens": 2}
    assert sleeper.post("/v1/completions", json=body).status_code == 200
    wait_until(lambda: num_replicas(sleeper) == 0, 120)
    health = httpx.get(f"{sleeper.url}/health", timeout=60, trust_env=False)
    assert (health.status_code, health.json()["status"]) == (200, "idle")
    with ThreadPoolExecutor(4) as callers:
        answers = list(
            callers.map(
                lambda _: sleeper.post("/v1/completions", json=body, timeout=180),
                range(4),
            )
        )
    assert [one.status_code for one in answers] == [200] * 4
    assert num_replicas(sleeper) == 1
