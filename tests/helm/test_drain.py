"""`tetris-serve drain-node`, which a worker's preStop hook calls."""

import subprocess
from collections.abc import Iterator

import httpx
import pytest
import yaml

from serving.cli import main
from tests.helm.live import NUM_CHUNKS, RayCluster, deploy
from tests.serving.conftest import BIN, clean_environment, find_free_ports, wait_until

DEADLINE_S = 90


@pytest.fixture
def cluster(tmp_path_factory) -> Iterator[RayCluster]:
    """A head without CPUs and one worker with room for one replica."""
    running = RayCluster(tmp_path_factory.mktemp("drain"))
    try:
        running.start_head(num_cpus=0)
        running.start_worker(num_cpus=1)
        yield running
    finally:
        running.end()


def replica_nodes(cluster: RayCluster) -> set[str]:
    """Nodes on which replicas of the application run."""
    details = cluster.ask("/api/serve/applications/")["applications"]["slow"]
    replicas = details["deployments"]["SlowStream"]["replicas"]
    return {r["node_id"] for r in replicas if r["state"] == "RUNNING"}


@pytest.mark.ray
@pytest.mark.slow
def test_a_drained_worker_finishes_its_streams_and_hands_over_its_replicas(cluster):
    (port,) = find_free_ports(1)
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "slow",
                "route_prefix": "/",
                "import_path": "tests.helm.slow_app:app",
            }
        ],
    }
    deploy(cluster, yaml.safe_dump(config), timeout_s=120)
    (old,) = replica_nodes(cluster)
    cluster.start_worker(num_cpus=1)
    with httpx.stream(
        "GET", f"http://127.0.0.1:{port}/", timeout=60, trust_env=False
    ) as stream:
        lines = stream.iter_lines()
        received = [next(lines)]
        drain = cluster.run(
            *("tetris-serve", "drain-node", "--node-id", old),
            *("--deadline", str(DEADLINE_S)),
            name="drain",
        )
        received += lines
    assert received == [str(number) for number in range(NUM_CHUNKS)]
    assert drain.process.wait(DEADLINE_S) == 0, drain.output
    assert "no replica is left" in drain.output
    (new,) = wait_until(lambda: replica_nodes(cluster), 60)
    assert new != old
    assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).is_success


@pytest.mark.ray
def test_without_a_ray_the_hook_fails_at_once_and_says_why():
    """Kubernetes then goes on with SIGTERM instead of waiting."""
    (port,) = find_free_ports(1)
    result = subprocess.run(
        [str(BIN / "tetris-serve"), "drain-node", "--node-id", 56 * "1"],
        env=clean_environment(RAY_ADDRESS=f"127.0.0.1:{port}"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "error: Ray does not drain node" in result.stderr


def test_the_command_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["drain-node", "--help"])
    assert exit_info.value.code == 0
    assert "--deadline" in capsys.readouterr().out
