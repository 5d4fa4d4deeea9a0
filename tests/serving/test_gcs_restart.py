"""Ray's GCS ends: what it knew is in a real Redis.

Alone, as `tetris-serve up` starts it again, and with all of its node.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from redis import Redis, RedisError

from loadtest.compare.processes import find_processes
from tests.helm.chart import require
from tests.helm.live import NUM_CHUNKS, RayCluster, deploy, slow_stream
from tests.serving.conftest import (
    Command,
    find_free_ports,
    start_up_command,
    wait_until,
)
from tests.serving.fleet import check_equal, processes, run_all

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

PASSWORD = "of-redis"
NOBODYS_KEY = "somebody else's"

# FAULTS.md promises it.
ALONE_BACK_S = 10


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of our own, which asks for a password: its address, and a client.

    Ray speaks to it from C++, which no Redis made of Python satisfies.
    """
    program = Path(require("redis-server", "run .ci/extras, or put it on PATH"))
    folder = tmp_path_factory.mktemp("redis")
    libraries = [*map(str, program.parent.parent.glob("lib/*-linux-gnu"))]
    (port,) = find_free_ports(1)
    client = Redis(port=port, password=PASSWORD)

    def answers() -> bool:
        with contextlib.suppress(RedisError):
            return bool(client.ping())
        return False

    with Command.start(
        [
            *(str(program), "--port", str(port), "--bind", "127.0.0.1"),
            *("--requirepass", PASSWORD, "--dir", str(folder), "--save", ""),
        ],
        folder / "redis.log",
        LD_LIBRARY_PATH=":".join(libraries),
    ) as server:
        wait_until(lambda: answers() or server.process.poll(), 30)
        assert server.process.poll() is None, server.output
        client.set(NOBODYS_KEY, 1)
        yield SimpleNamespace(address=f"127.0.0.1:{port}", client=client)


def test_streams_go_on_and_serve_works_when_the_gcs_comes_back(redis, tmp_path):
    """Of a deployment that keeps no replica while idle: requests wait for one then."""
    settings = {
        "engine.dtype": "float32",
        "replicas.min": 0,
        "replicas.max": 1,
        "replicas.downscale_delay_s": 1,
    }
    login = {"RAY_REDIS_ADDRESS": redis.address, "RAY_REDIS_PASSWORD": PASSWORD}
    with start_up_command(tmp_path / "up.log", settings, **login) as server:
        assert redis.client.dbsize() > 1
        run_all(server)
        expected = run_all(server)
        (gcs,) = processes(server, "gcs")
        check_equal(run_all(server, gcs.kill), expected)
        server.command.wait_for("gcs_server had died and was started", ALONE_BACK_S)
        # Nothing is broken: Serve's controller can still end and start replicas, by
        # Ray and by what it knew.
        asleep = (200, {"status": "idle", "running_replicas": 0})
        wait_until(lambda: server.health() == asleep, 180)
        check_equal(run_all(server), expected)
        assert server.num_replicas() == 1
        family = server.command.descendants()
        assert server.command.stop() == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    # The next run is to begin anew, and what is not ours stays.
    assert redis.client.keys() == [NOBODYS_KEY.encode()]


@pytest.fixture
def cluster(redis: Any, tmp_path_factory) -> Iterator[RayCluster]:
    """A head without CPUs and a worker, with the variables that KubeRay sets."""
    settings = {
        "RAY_REDIS_ADDRESS": redis.address,
        "RAY_external_storage_namespace": "a-cluster",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }
    with RayCluster(tmp_path_factory.mktemp("gcs"), settings) as running:
        running.start_head(num_cpus=0, options=f"--redis-password={PASSWORD}")
        running.start_worker(num_cpus=1)
        yield running


@contextlib.contextmanager
def stream_by(proxy: psutil.Process, url: str) -> Iterator[Iterator[str]]:
    """Stream through one of two proxies, which share a port on this machine."""
    for _ in range(50):
        with httpx.stream("GET", url, timeout=120, trust_env=False) as stream:
            network = stream.extensions["network_stream"]
            own = network.get_extra_info("client_addr")
            if any(own == one.raddr for one in proxy.net_connections()):
                yield stream.iter_lines()
                return
    pytest.fail("no connection came to the worker's proxy")


def test_workers_serve_on_without_their_head(cluster):
    """With the replicas they had; the head's own proxy goes with it."""
    (port,) = find_free_ports(1)
    url = f"http://127.0.0.1:{port}/"
    deploy(cluster, slow_stream(port, "EveryNode"), 300)
    head, worker = cluster.nodes

    def find_proxy() -> psutil.Process | None:
        family = find_processes(worker.process.pid)
        return next((one for role, one in family if role == "Python proxy"), None)

    proxy = wait_until(find_proxy, 60)
    with stream_by(proxy, url) as lines:
        received = [next(lines)]
        family = [*find_processes(head.process.pid)]
        (gcs,) = [process for role, process in family if role == "gcs"]
        gcs.kill()
        # As in a container, all of the head's processes end with it.
        head.process.wait(60)
        psutil.wait_procs([one for role, one in family if role == "Python proxy"], 60)
        received += lines
    assert received == [str(number) for number in range(NUM_CHUNKS)]
    # There is no GCS now, and the worker's proxy is the only one.
    with httpx.stream("GET", url, timeout=60, trust_env=False) as stream:
        assert next(stream.iter_lines()) == "0"
