"""One of two hosts vanishes under streams; network namespaces stand for hosts.

Not collected by itself, for it takes root and two minutes: `make faults` names it.
"""

import os
import subprocess
import time
from collections.abc import Iterator

import pytest
import yaml

from tests.helm.live import RayCluster, deploy
from tests.serving.conftest import (
    DEMO_CONFIG,
    ROOT,
    START_TIMEOUT_S,
    Server,
    find_free_ports,
    wait_until,
)
from tests.serving.fleet import check_equal, run_all

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces"),
]

NEAR_IP, FAR_IP = "10.213.7.1", "10.213.7.2"
NEAR_END, FAR_END = "tetris-near", "tetris-far"
HOST = "tetris-host"

# FAULTS.md promises these.
STALL_S = 15
FORGOTTEN_S = 60


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@pytest.fixture
def wire() -> Iterator[None]:
    """A host of its own, and a wire to it."""
    ip(f"netns add {HOST}")
    try:
        ip(f"link add {NEAR_END} type veth peer name {FAR_END} netns {HOST}")
        for command in (
            f"address add {NEAR_IP}/30 dev {NEAR_END}",
            f"link set {NEAR_END} up",
            f"-n {HOST} address add {FAR_IP}/30 dev {FAR_END}",
            f"-n {HOST} link set {FAR_END} up",
            f"-n {HOST} link set lo up",
        ):
            ip(command)
        yield
    finally:
        ip(f"netns delete {HOST}")


def start_far(cluster: RayCluster) -> None:
    enter = ("nsenter", f"--net=/run/netns/{HOST}")
    cluster.start_worker(1, f"--node-ip-address={FAR_IP}", *enter)


@pytest.fixture
def cluster(
    wire: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayCluster]:
    """A head for the front and an engine, and a host for the other engine."""
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}
    folder = tmp_path_factory.mktemp("hosts")
    with RayCluster(folder, settings, host=NEAR_IP) as running:
        running.start_head(1, f"--node-ip-address={NEAR_IP} --labels=at=head")
        start_far(running)
        yield running


def serve(cluster: RayCluster) -> Server:
    config = yaml.safe_load((ROOT / "configs" / "serve" / "tiny.yaml").read_text())
    (port,) = find_free_ports(1)
    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= {
        "config": str(DEMO_CONFIG),
        "engine.dtype": "float32",
        "engine.max_num_seqs": 10,
        "replicas.min": 2,
        "replicas.max": 2,
        "replicas.num_cpus": 1,
        "http.fronts.label_selector": {"at": "head"},
    }
    deploy(cluster, yaml.safe_dump(config), START_TIMEOUT_S)
    return Server(cluster.nodes[0], port, 0)


def test_streams_of_a_host_that_vanishes_go_on_on_the_other(cluster):
    server = serve(cluster)
    wait_until(lambda: server.num_replicas() == 2, START_TIMEOUT_S)
    run_all(server)
    expected = run_all(server)

    cut_s: list[float] = []

    def cut() -> None:
        ip(f"-n {HOST} link set {FAR_END} down")
        cut_s.append(time.monotonic())

    streams = run_all(server, cut)
    check_equal(streams, expected)
    stalls_s = [stall for one in streams if (stall := one.gap_at(cut_s[0]))]
    # Some of them ran over there.
    assert 5 < max(stalls_s) < STALL_S

    # Ray lists it for a while; whoever asks meanwhile is answered here.
    while server.num_replicas() == 2:
        began_s = time.monotonic()
        check_equal(run_all(server), expected)
        assert time.monotonic() - began_s < STALL_S
        assert time.monotonic() - cut_s[0] < FORGOTTEN_S

    ip(f"-n {HOST} link set {FAR_END} up")
    start_far(cluster)
    wait_until(lambda: server.num_replicas() == 2, START_TIMEOUT_S)
    check_equal(run_all(server), expected)
