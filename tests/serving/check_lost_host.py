"""One of two hosts vanishes under streams; network namespaces stand for hosts.

Not collected by itself, for it takes root and two minutes: `make faults` names it.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.serving.conftest import (
    BIN,
    DEMO_CONFIG,
    ROOT,
    START_TIMEOUT_S,
    Command,
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

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "PYTHONPATH": str(ROOT),
}


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@dataclass
class TwoHosts:
    """A head with the front and an engine, and a host with the other engine."""

    folder: Path
    gcs_port: int
    nodes: list[Command]

    def start_node(self, options: str, *prefix: str) -> Command:
        agent_port, grpc_port, metrics_port = find_free_ports(3)
        options += (
            f" --dashboard-agent-listen-port={agent_port}"
            f" --dashboard-agent-grpc-port={grpc_port}"
            f" --metrics-export-port={metrics_port} --object-store-memory=200000000"
        )
        ray = [str(BIN / "ray"), "start", "--block", "--num-cpus=1", *options.split()]
        log = self.folder / f"node{len(self.nodes)}.log"
        node = Command.start([*prefix, *ray], log, **ENVIRONMENT)
        self.nodes.append(node)
        node.wait_for("Ray runtime started", 300)
        return node

    def start_far(self) -> None:
        self.start_node(
            f"--address={NEAR_IP}:{self.gcs_port} --node-ip-address={FAR_IP}",
            *("nsenter", f"--net=/run/netns/{HOST}"),
        )


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


@pytest.fixture
def hosts(wire: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    (gcs_port,) = find_free_ports(1)
    running = TwoHosts(tmp_path_factory.mktemp("hosts"), gcs_port, [])
    yield running
    for node in running.nodes:
        node.end()


def serve(hosts: TwoHosts) -> Server:
    """Serve an engine on each host, and the front on the head."""
    dashboard_port, client_port, port = find_free_ports(3)
    head = hosts.start_node(
        f"--head --node-ip-address={NEAR_IP} --port={hosts.gcs_port} --labels=at=head "
        f"--dashboard-port={dashboard_port} --ray-client-server-port={client_port} "
        f"--temp-dir={hosts.folder}"
    )
    hosts.start_far()
    config = yaml.safe_load((ROOT / "configs" / "serve" / "tiny.yaml").read_text())
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
    file = hosts.folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    address = f"http://127.0.0.1:{dashboard_port}"
    command = [str(BIN / "serve"), "deploy", str(file), "--address", address]
    deploy = Command.start(command, hosts.folder / "deploy.log", **ENVIRONMENT)
    assert deploy.process.wait(300) == 0, deploy.output
    return Server(head, port, 0)


def test_streams_of_a_host_that_vanishes_go_on_on_the_other(hosts):
    server = serve(hosts)
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
    hosts.start_far()
    wait_until(lambda: server.num_replicas() == 2, START_TIMEOUT_S)
    check_equal(run_all(server), expected)
