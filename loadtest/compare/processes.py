"""A deployment's processes by role: memory, descriptors, threads, CPU; victims."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil

_ROLES = (
    ("serving.cli up", "up"),
    ("tetris-serve up", "up"),
    ("VLLM::EngineCore", "engine"),
    ("VLLM::Worker", "worker"),
    ("ServeController", "controller"),
    ("ProxyActor", "Python proxy"),
    ("HAProxyManager", "proxy's manager"),
    ("haproxy", "proxy"),
    ("TetrisFront", "front"),
    ("grammar_trial", "grammars"),
    ("ServeReplica", "replica"),
    ("ray::IDLE", "idle Ray worker"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "gcs"),
    ("TelemetryAgent", "telemetry"),
    ("Agent", "Ray agents"),
    ("dashboard", "dashboard"),
    ("ray/_private/log_monitor", "Ray monitors"),
    ("ray/autoscaler/_private/monitor", "Ray monitors"),
    ("vllm.entrypoints", "server"),
    ("vllm serve", "server"),
    ("VLLM::APIServer", "server"),
)
_OTHER = "other"
ENGINE_ROLES = frozenset({"engine", "worker"})
RAY_ROLES = frozenset(
    {"raylet", "gcs", "Ray agents", "Ray monitors", "dashboard", "idle Ray worker"}
)
"""Ray's own daemons: they take their time also where nobody asks."""

HOST = "host"
VICTIMS = {
    "engine": ("engine",),
    "replica": ("replica", "server"),
    "front": ("front",),
    HOST: ("raylet",),
}
"""Roles of the processes that each kind of kill may hit."""

_SPAWNED = "multiprocessing.spawn"
_ROLE_BELOW = {"dashboard": "dashboard", "engine": "worker"}
"""Roles of spawned processes without a title, by that of their parent."""


def role_of(command: str) -> str:
    """Return what a process is for, by its command line or title."""
    return next((role for mark, role in _ROLES if mark in command), _OTHER)


def find_processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield role and process of everything that descends from a process.

    An engine may lack its title: setproctitle writes over the arguments, and finds them
    by the first variable of the environment, which may have been set anew before; Ray
    hands its workers the environment in any order. What is left then is the parent.
    """
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            yield _find_role(process), process
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue


def find_victims(pid: int, kind: str) -> list[psutil.Process]:
    """Return the processes of a deployment that a kind of kill may hit."""
    return [one for role, one in find_processes(pid) if role in VICTIMS[kind]]


def _find_role(process: psutil.Process | None) -> str:
    command = " ".join(process.cmdline()) if process else ""
    if process and _SPAWNED in command:
        return _ROLE_BELOW.get(_find_role(process.parent()), "engine")
    return role_of(command)


def sample(pid: int) -> list[dict[str, Any]]:
    """Return a row for each role below a process.

    Each has `epoch_s`, `role`, `pids`, `num_processes`, `memory_mib` (private: resident
    without shared), `num_fds`, `num_threads`.
    """
    now_s, by_role = time.time(), dict[str, dict[str, Any]]()
    for role, process in find_processes(pid):
        try:
            with process.oneshot():
                memory = process.memory_info()
                counts: dict[str, float] = {"num_processes": 1}
                counts["num_fds"] = process.num_fds()
                counts["num_threads"] = process.num_threads()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        row = by_role.setdefault(role, {"epoch_s": now_s, "role": role, "pids": []})
        row["pids"] = sorted([*row["pids"], process.pid])
        counts["memory_mib"] = round((memory.rss - memory.shared) / 2**20, 2)
        row |= {name: row.get(name, 0) + count for name, count in counts.items()}
    return [*by_role.values()]


CpuTimes = dict[psutil.Process, tuple[str, float]]
"""Role of each process, and the seconds of CPU time that it has taken so far."""


def read_cpu_times(pid: int) -> CpuTimes:
    """Return the CPU time of everything that descends from a process."""
    found: CpuTimes = {}
    for role, process in find_processes(pid):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            found[process] = role, times.user + times.system
    return found
