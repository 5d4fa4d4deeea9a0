"""What chaos does to a server's processes, on processes that only pretend."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from loadtest.client.endpoint import Endpoint
from loadtest.client.errors import LoadTestError
from loadtest.client.outcome import Outcome
from loadtest.compare.arms import parse_arm
from loadtest.compare.chaos import Chaos, ServerChaos, log_drops, parse_chaos
from loadtest.compare.deployment import Deployment, Launcher
from loadtest.compare.redeploy import describe_release, redeploy
from loadtest.report.objectives import judge_chaos

from .stand_in_server import WAIT_S, wait_for

NOWHERE = Endpoint("http://127.0.0.1:9")
REDEPLOY_WAIT_S = 600.0
# The title is put together, so that only the child carries it. As Serve does, it
# starts another child when one has died.
PARENT = """
import subprocess, sys
sleep = "import time; time.sleep(600)"
while True:
    subprocess.run([sys.executable, "-c", sleep, "{}" + "{}"])
"""


@contextmanager
def run_server(*title: str) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Run a process with a child of this title."""
    script = PARENT.format(*title)
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        parent = psutil.Process(process.pid)
        wait_for(
            lambda: any("".join(title) in str(c.cmdline()) for c in parent.children())
        )
        yield parent, parent.children()[0]
        parent.suspend()  # Starts nothing more.
        children = parent.children()
        process.kill()
        for child in children:
            child.kill()


@pytest.fixture
def replica() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A server and its replica."""
    with run_server("ray::Serve", "Replica:tetris") as both:
        yield both


def strike(
    pid: int,
    *blows: tuple[str, float],
    order: Callable[[], Any] | None = None,
    ticks: int = 1,
) -> list[dict[str, Any]]:
    """Carry blows out on a run of ten seconds that began six seconds ago."""
    said: list[str] = []
    deployment = Deployment(NOWHERE, pid=pid, redeploy=order)
    chaos = ServerChaos(blows, deployment, 10.0, said.append)
    for _ in range(ticks):
        chaos.tick(time.time() - 6.0)
    chaos.end()
    assert len(said) == len(chaos.log) == len(blows)
    return chaos.log


def verdict_of(log: list[dict[str, Any]]) -> Any:
    """Judge one blow."""
    place = {"arm": "a", "workload": "mixed", "load": "closed:1"}
    [verdict] = judge_chaos([{**place, "chaos": log}])
    return verdict


def test_chaos_is_read_in_the_order_of_its_moments():
    chaos = parse_chaos("redeploy@0.7, drop=0.05,kill-engine@0.3")
    assert chaos == Chaos((("kill-engine", 0.3), ("redeploy", 0.7)), 0.05)
    assert parse_chaos("") == Chaos()


@pytest.mark.parametrize("text", ["kill@0.5", "drop=2", "kill-engine@1.5", "burn@0.1"])
def test_chaos_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"part of the run"):
        parse_chaos(text)


def test_an_engine_is_killed_when_its_moment_has_come_and_not_before():
    with run_server("VLLM::Engine", "Core") as (parent, victim):
        blows = ("kill-replica", 0.0), ("kill-engine", 0.5), ("kill-engine", 0.7)
        none, blow, never = strike(parent.pid, *blows, ticks=3)
        assert blow["what"] == f"killed the engine process {victim.pid}"
        assert blow["at_s"] == pytest.approx(6.0, abs=0.1)
        victim.wait(WAIT_S)
        assert parent.is_running()
    assert [one["done"] for one in (none, blow, never)] == [False, True, False]
    assert none["what"] == "there is no such process"
    # What the end of a run finds undone has failed.
    verdict = verdict_of([never])
    assert verdict.objective == "chaos: kill-engine is done"
    assert not verdict.is_met
    assert "at 7 s the run was over" in verdict.note


def test_a_redeployment_that_fails_says_why(replica):
    def refuse() -> None:
        raise LoadTestError("serve deploy exited with 3")

    [blow] = strike(replica[0].pid, ("redeploy", 0.0), order=refuse)
    assert (blow["what"], blow["done"]) == ("serve deploy exited with 3", False)


def test_a_redeployment_is_done_when_the_replicas_are_others(replica):
    parent, old = replica

    def replace() -> None:
        old.kill()
        wait_for(lambda: [c for c in parent.children() if c.pid != old.pid])
        wait_for(lambda: "Replica" in str(parent.children()[-1].cmdline()))

    [blow] = strike(parent.pid, ("redeploy", 0.0), order=replace, ticks=2)
    assert f"replicas {{{old.pid}}} were replaced by " in blow["what"]
    assert blow["done"]


def test_a_redeployment_that_was_only_ordered_is_not_done(replica):
    parent, old = replica
    blows = ("redeploy", 0.0), ("kill-replica", 0.1)
    log = strike(parent.pid, *blows, order=lambda: None, ticks=3)
    assert [blow["done"] for blow in log] == [False, False]
    assert f"replicas {{{old.pid}}} are not replaced" in log[0]["what"]
    assert "what came before was not" in log[1]["what"]


def test_dropping_no_stream_has_not_happened():
    outcomes = [Outcome("1", failure="client_dropped"), Outcome("2")]
    assert log_drops(0.0, outcomes) == []
    assert verdict_of(log_drops(0.1, outcomes)).is_met
    assert not verdict_of(log_drops(0.1, outcomes[1:])).is_met


def test_every_release_is_the_same_deployment_under_a_new_name():
    arguments = ["--config", "/tiny.yaml", "--policy", "tetris"]
    arguments += ["--set", "replicas.max=2", "--set", "engine.enforce_eager=true"]
    first, second = (
        describe_release(arguments, name)["applications"][0] for name in ("1", "2")
    )
    assert first["name"] == "tetris"
    assert first["args"] == second["args"]
    assert first["args"] == {
        "http.access.allow_anonymous": True,
        "config": "/tiny.yaml",
        "policy.name": "tetris",
        "replicas.max": 2,
        "engine.enforce_eager": True,
    }
    assert first["runtime_env"] != second["runtime_env"]


@pytest.mark.ray
def test_a_release_that_serve_does_not_take_is_explained():
    with pytest.raises(LoadTestError, match="serve deploy exited with 1"):
        redeploy("http://127.0.0.1:9", ["--config", "configs/tiny.yaml"])


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_the_redeployment_of_an_arm_replaces_its_replicas(tmp_path):
    settings = ["replicas.max=1", "replicas.drain_timeout_s=5"]
    launcher = Launcher(tmp_path, "configs/tiny.yaml", settings)
    with launcher.run(parse_arm("tetris:2+2"), print) as deployment:
        chaos = ServerChaos([("redeploy", 0.0)], deployment, 1.0, print)
        began_s = time.time()

        def is_done() -> bool:
            chaos.tick(began_s)
            return bool(chaos.log[0].get("done"))

        wait_for(is_done, REDEPLOY_WAIT_S)
