"""What chaos does to a server's processes, on processes that only pretend."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from loadtest.http_bench.chaos import ServerAction, ServerChaos
from loadtest.http_bench.deployment import Deployment

WAIT_S = 120.0
# The title is put together, so that only the child carries it.
PARENT = """
import subprocess, sys, time
sleep = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleep, "VLLM::Engine" + "Core"])
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[psutil.Process]:
    """A process with a child that is titled like an engine."""
    with subprocess.Popen([sys.executable, "-c", PARENT]) as process:
        parent = psutil.Process(process.pid)
        deadline_s = time.monotonic() + WAIT_S
        while not any("EngineCore" in str(c.cmdline()) for c in parent.children()):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        children = parent.children()
        yield parent
        for child in children:
            child.kill()
        process.kill()


def strike(pid: int | None, *actions: ServerAction, command: str | None = None):
    """Carry actions out on a run of one second that has just begun."""
    said: list[str] = []
    deployment = Deployment("http://127.0.0.1:9", (), 0.0, pid, "http://ray:8265")
    chaos = ServerChaos(actions, deployment, 1.0, command, said.append)
    began_s = time.time()
    chaos.begin(began_s)
    deadline_s = time.monotonic() + WAIT_S
    while len(chaos.log) < len(actions):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    chaos.end()
    assert len(said) == len(actions)
    return [blow["what"] for blow in chaos.log], chaos.log[-1]["at_s"]


def test_an_engine_is_killed_when_its_moment_has_come(server):
    [engine] = server.children()
    [what], after_s = strike(server.pid, ServerAction("kill-engine", 0.3))
    assert what == f"killed the engine process {engine.pid}"
    assert after_s >= 0.3
    deadline_s = time.monotonic() + WAIT_S
    while engine.status() != psutil.STATUS_ZOMBIE:  # Nobody waits for it.
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert server.is_running()


def test_what_cannot_be_done_is_said(server):
    what, _ = strike(
        server.pid, ServerAction("kill-replica", 0.0), ServerAction("redeploy", 0.1)
    )
    assert what == [
        "there is no such process",
        "give --redeploy-command",
    ]
    [what], _ = strike(None, ServerAction("kill-engine", 0.0))
    assert "--deployment-pid" in what


def test_a_redeployment_runs_the_users_command():
    command = r"printf 'deployed to {dashboard}\n\033[39m\n'; exit 3"
    [what], _ = strike(1, ServerAction("redeploy", 0.0), command=command)
    assert "exited with 3 deployed to http://ray:8265" in what


def test_nothing_more_happens_after_the_end_of_a_run():
    deployment = Deployment("http://127.0.0.1:9", (), 0.0)
    said: list[str] = []
    action = ServerAction("kill-engine", 0.9)
    chaos = ServerChaos([action], deployment, 600.0, None, said.append)
    chaos.begin(time.time())
    chaos.end()
    assert not chaos.log
    assert not said
