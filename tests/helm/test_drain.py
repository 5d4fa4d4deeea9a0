"""Where replicas run: never on the head, and no longer on a worker that is drained.

`tetris-serve drain-node` is what a worker's preStop hook calls.
"""

from collections.abc import Iterator

import httpx
import pytest

from serving.app import front_options_of, settings_from_args
from tests.conftest import run
from tests.helm import chart
from tests.helm.live import NUM_CHUNKS, RayCluster, deploy, slow_stream
from tests.serving.conftest import BIN, clean_environment, find_free_ports, wait_until

DEADLINE_S = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[RayCluster]:
    """A head without CPUs and one worker with room for one replica."""
    with RayCluster(tmp_path_factory.mktemp("drain")) as running:
        # KubeRay's name for the head's group.
        running.start_head(num_cpus=0, RAY_NODE_TYPE_NAME="headgroup")
        running.start_worker(num_cpus=1)
        yield running


@pytest.fixture(scope="module")
def port() -> int:
    """Where Serve listens; it does so from the first deployment to the last."""
    return find_free_ports(1)[0]


def replica_nodes(cluster: RayCluster) -> set[str]:
    details = cluster.ask("/api/serve/applications/")["applications"]["slow"]
    replicas = details["deployments"]["SlowStream"]["replicas"]
    return {r["node_id"] for r in replicas if r["state"] == "RUNNING"}


@pytest.mark.ray
@pytest.mark.slow
def test_what_asks_for_no_cpu_stays_off_the_head_all_the_same(cluster, port):
    """The chart's options of fronts, on more replicas than chance would spare."""
    settings = settings_from_args(chart.demo().application["args"])
    options = front_options_of(settings)["ray_actor_options"]
    spread = {"num_replicas": 6, "ray_actor_options": options}
    deploy(cluster, slow_stream(port, "HeadOnly", **spread), timeout_s=300)
    # Serve's controller always runs on the head.
    head = cluster.ask("/api/serve/applications/")["controller_info"]["node_id"]
    nodes = replica_nodes(cluster)
    assert nodes
    assert head not in nodes


@pytest.mark.ray
@pytest.mark.slow
def test_a_drained_worker_finishes_its_streams_and_hands_over_its_replicas(
    cluster, port
):
    deploy(cluster, slow_stream(port, "HeadOnly"), timeout_s=300)
    (old,) = replica_nodes(cluster)
    cluster.start_worker(num_cpus=1)
    with httpx.stream(
        "GET", f"http://127.0.0.1:{port}/", timeout=120, trust_env=False
    ) as stream:
        lines = stream.iter_lines()
        received = [next(lines)]
        drain = cluster.run(
            *("tetris-serve", "drain-node", "--node-id", old),
            *("--deadline", str(DEADLINE_S)),
            name="drain",
            # Which has no way to Ray's head.
            HTTP_PROXY="http://127.0.0.1:1",
        )
        received += lines
    assert received == [str(number) for number in range(NUM_CHUNKS)]
    assert drain.process.wait(DEADLINE_S) == 0, drain.output
    assert "no replica and no proxy is left" in drain.output
    (new,) = wait_until(lambda: replica_nodes(cluster), 120)
    assert new != old
    with httpx.stream("GET", f"http://127.0.0.1:{port}/", timeout=120) as stream:
        assert next(stream.iter_lines()) == "0"


def test_without_a_ray_the_hook_fails_and_says_why():
    """Kubernetes then goes on with SIGTERM instead of waiting."""
    (port,) = find_free_ports(1)
    # Ray itself would go on trying for half a minute.
    names = ("RAY_gcs_rpc_server_connect_timeout_s", "RAY_py_gcs_connect_timeout_s")
    given = {"RAY_ADDRESS": f"127.0.0.1:{port}", **dict.fromkeys(names, "1")}
    hook = (BIN / "tetris-serve", "drain-node", "--node-id", 56 * "1")
    result = run(*hook, env=clean_environment(**given), status=1)
    assert "error: Ray does not drain node" in result.stderr
