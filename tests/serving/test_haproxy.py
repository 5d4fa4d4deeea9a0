"""Where `up` puts Serve's HAProxy; that it works is what all tests with Ray show."""

import os
import socket
import stat
from pathlib import Path

import pytest

from serving.local.haproxy import own_haproxy

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
PORTS = [
    f"RAY_SERVE_{name}_PORT"
    for name in ("FALLBACK_PROXY_HTTP", "HAPROXY_STATS", "HAPROXY_METRICS")
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_SERVE_")}
    monkeypatch.setattr(os, "environ", kept)


def test_two_that_run_at_a_time_share_neither_ports_nor_folder():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        (wanted,) = other.getsockname()[1:]
        os.environ[PORTS[0]] = str(wanted)
        with own_haproxy("127.0.0.1", frozenset({9101})):
            assert os.environ[SWITCH] == "1"
            # What the user has named stays, whoever has it.
            assert os.environ[PORTS[0]] == str(wanted)
            taken = {int(os.environ[name]) for name in PORTS} | {9101}
            assert len(taken) == 4
            folder = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


@pytest.mark.parametrize("host", ["::1", "localhost", "192.0.2.7"])
def test_serves_own_proxy_stays_where_haproxy_would_find_no_front(host):
    with own_haproxy(host, frozenset()):
        assert SWITCH not in os.environ


def test_the_users_switch_decides():
    os.environ[SWITCH] = "0"
    with own_haproxy("127.0.0.1", frozenset()):
        assert os.environ[SWITCH] == "0"
        assert not any(name in os.environ for name in PORTS)
