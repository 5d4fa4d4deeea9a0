"""One of two hosts vanishes under streams; network namespaces stand for hosts.

Not collected by itself, for it takes root and two minutes: `make faults` names it.
"""

import os
import time
from urllib.parse import urlsplit

import pytest

from loadtest.compare.arms import parse_arm
from loadtest.storm.hosts import Hosts
from tests.serving.conftest import DEMO_CONFIG, START_TIMEOUT_S, Server, wait_until
from tests.serving.fleet import check_equal, run_all

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces"),
]

# FAULTS.md promises these.
STALL_S = 15
FORGOTTEN_S = 60


def test_streams_of_a_host_that_vanishes_go_on_on_the_other(tmp_path):
    settings = ("engine.dtype=float32", "engine.max_num_seqs=10")
    replicas = ("replicas.min=2", "replicas.max=2")
    hosts = Hosts(tmp_path, str(DEMO_CONFIG), (*settings, *replicas), 2)
    with hosts.run(parse_arm("goodput:4"), print) as deployment:
        port = urlsplit(deployment.endpoint.url).port
        check_streams(Server(None, port, 0), hosts)


def check_streams(server, hosts):
    run_all(server)
    expected = run_all(server)

    cut_s: list[float] = []

    def cut() -> None:
        hosts.set_wire(up=False)
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

    hosts.set_wire(up=True)
    hosts.start_far()
    wait_until(lambda: server.num_replicas() == 2, START_TIMEOUT_S)
    check_equal(run_all(server), expected)
