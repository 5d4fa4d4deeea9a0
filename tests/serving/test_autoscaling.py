"""Serve's own autoscaling and limits, seen from outside."""

import pytest

from tests.serving.conftest import START_TIMEOUT_S, Server, load, wait_until
from tests.serving.fleet import processes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def steps_by_replica(server: Server) -> dict[str, float]:
    samples = server.samples("ray_tetris_engine_steps_total")
    return {sample.labels["replica"]: sample.value for sample in samples}


def test_load_starts_a_second_replica_and_both_serve(server):
    with load(server, num_clients=8) as statuses:
        wait_until(lambda: len(processes(server, "replica")) == 2, START_TIMEOUT_S)
    # It starts twice as fast without.
    wait_until(lambda: server.num_replicas() == 2, START_TIMEOUT_S)
    before = steps_by_replica(server)

    def both_have_served() -> bool:
        now = steps_by_replica(server)
        return len(now) == 2 and all(
            steps > before.get(replica, 0) for replica, steps in now.items()
        )

    with load(server, num_clients=8) as later:
        wait_until(both_have_served, 300)
    assert {*statuses, *later} == {200}


def test_what_exceeds_replicas_and_queue_is_refused_and_may_come_back(server):
    # Two replicas hold 8 requests each, and 16 more may wait.
    with load(server, num_clients=48, max_tokens=60) as statuses:
        wait_until(lambda: {200, 503} <= set(statuses), 300)
    assert set(statuses) == {200, 503}
    assert server.complete(max_tokens=2).status_code == 200
