"""What chaos does to a server's processes, on processes that only pretend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.client.endpoint import Endpoint
from loadtest.client.outcome import Outcome
from loadtest.client.records import read_records
from loadtest.compare.arms import parse_arm
from loadtest.compare.chaos import ServerAction, ServerChaos, log_client_actions
from loadtest.compare.deployment import Deployment, Launcher
from loadtest.compare.redeploy import describe_release, redeploy_command
from loadtest.report.objectives import judge_chaos

from .stand_in_server import WAIT_S, wait_for
from .test_experiment import experiment

ROOT = Path(__file__).resolve().parents[3]
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
def engine() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A server and its engine."""
    with run_server("VLLM::Engine", "Core") as both:
        yield both


@pytest.fixture
def replica() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A server and its replica."""
    with run_server("ray::Serve", "Replica:tetris") as both:
        yield both


def strike(
    pid: int | None, *actions: ServerAction, command: str | None = None
) -> list[dict[str, Any]]:
    """Carry actions out on a run of one second that has just begun."""
    said: list[str] = []
    deployment = Deployment(NOWHERE, pid=pid, dashboard="http://ray:8265")
    chaos = ServerChaos(actions, deployment, 1.0, command, said.append)
    chaos.begin(time.time())
    wait_for(lambda: len(chaos.log) == len(actions))
    chaos.end()
    assert len(said) == len(chaos.log) == len(actions)
    return chaos.log


# The server


def test_an_engine_is_killed_when_its_moment_has_come(engine):
    parent, victim = engine
    [blow] = strike(parent.pid, ServerAction("kill-engine", 0.3))
    assert blow["what"] == f"killed the engine process {victim.pid}"
    assert blow["done"]
    assert blow["at_s"] >= 0.3
    victim.wait(WAIT_S)
    assert parent.is_running()


def test_what_cannot_be_done_is_said(engine):
    parent, _ = engine
    blows = strike(
        parent.pid, ServerAction("kill-replica", 0.0), ServerAction("redeploy", 0.1)
    )
    assert [blow["what"] for blow in blows] == [
        "there is no such process",
        "give --redeploy-command",
    ]
    for kind in ("kill-engine", "redeploy"):
        blows += strike(None, ServerAction(kind, 0.0))
        assert "--deployment-pid" in blows[-1]["what"]
    assert not any(blow["done"] for blow in blows)


def test_a_redeployment_that_fails_says_why(replica):
    command = r"printf 'deployed to {dashboard}\n\033[39m\n'; exit 3"
    [blow] = strike(replica[0].pid, ServerAction("redeploy", 0.0), command=command)
    assert "exited with 3 deployed to http://ray:8265" in blow["what"]
    assert not blow["done"]


def test_a_redeployment_is_done_when_the_replicas_are_others(replica):
    parent, old = replica
    command = f"kill {old.pid}"
    [blow] = strike(parent.pid, ServerAction("redeploy", 0.0), command=command)
    assert re.search(rf"replicas {old.pid} were replaced by \d+$", blow["what"])
    assert blow["done"]


def test_a_redeployment_that_was_only_ordered_is_not_done(replica, tmp_path):
    parent, old = replica
    ordered = tmp_path / "ordered"
    deployment = Deployment(NOWHERE, pid=parent.pid)
    actions = [ServerAction("redeploy", 0.0), ServerAction("kill-replica", 0.1)]
    chaos = ServerChaos(actions, deployment, 1.0, f"touch {ordered}", lambda _: None)
    chaos.begin(time.time())
    wait_for(ordered.exists)
    chaos.end()
    assert [blow["done"] for blow in chaos.log] == [False, False]
    assert f"replicas {old.pid} are not replaced" in chaos.log[0]["what"]
    assert "what came before was not" in chaos.log[1]["what"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_nothing_more_happens_after_the_end_of_a_run_and_the_run_has_failed(has_begun):
    deployment = Deployment(NOWHERE)
    said: list[str] = []
    action = ServerAction("kill-engine", 0.9)
    chaos = ServerChaos([action], deployment, 600.0, None, said.append)
    if has_begun:
        chaos.begin(time.time())
    chaos.end()
    place = {"arm": "a", "workload": "mixed", "load": "closed:1"}
    [verdict] = judge_chaos([{**place, "chaos": chaos.log}])
    assert verdict.objective == "chaos: kill-engine is done"
    assert not verdict.is_met
    assert "at 540 s the run was over" in verdict.note
    assert len(said) == 1


# Redeployment


def test_every_release_is_the_same_deployment_under_a_new_name():
    config = Path("configs/tiny.yaml")
    settings = ["replicas.max=2", "engine.enforce_eager=true"]
    first, second = (
        describe_release(config, "tetris", settings, name)["applications"][0]
        for name in ("1", "2")
    )
    assert first["name"] == "tetris"
    assert first["args"] == second["args"]
    assert first["args"] == {
        "config": str(config.resolve()),
        "policy.name": "tetris",
        "replicas.max": 2,
        "engine.enforce_eager": True,
    }
    assert first["runtime_env"] != second["runtime_env"]


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_the_redeployment_of_an_arm_replaces_its_replicas(tmp_path):
    settings = ["replicas.max=1", "replicas.drain_timeout_s=5"]
    launcher = Launcher(tmp_path, "configs/tiny.yaml", settings)
    with launcher.run(parse_arm("tetris:2+2"), print) as deployment:
        assert deployment.redeploy_command is not None
        action = ServerAction("redeploy", 0.0)
        chaos = ServerChaos([action], deployment, 1.0, None, print)
        chaos.begin(time.time())
        wait_for(lambda: chaos.log, REDEPLOY_WAIT_S)
        chaos.end()
    assert chaos.log[0]["done"], chaos.log


def test_the_command_that_redeploys_needs_nothing_but_the_dashboard():
    command = redeploy_command(
        ROOT, ["--config", "configs/tiny.yaml", "--set", "a.b=[1, 2]"]
    )
    command = command.replace("{dashboard}", "http://127.0.0.1:9")
    finished = subprocess.run(
        ["/bin/sh", "-c", f"{command} --help"], capture_output=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


# Clients


def befallen(number: int, kind: str, at_s: float) -> Outcome:
    """A request that was stalled or dropped."""
    return Outcome(f"r-{number}", chaos=kind, sent_s=at_s)


def test_streams_that_were_stalled_and_dropped_are_counted_for_each_action():
    outcomes = [
        befallen(1, "stall", 11.0),
        befallen(2, "stall", 12.0),
        befallen(3, "stall", 51.0),
        befallen(4, "stall", 52.0),
        befallen(5, "drop", 61.0),
        Outcome("r-6", sent_s=62.0),
    ]
    text = "drop@0.6x2,stall@0.1x3=5,stall@0.5x1,stall@0.9x1"
    rows = log_client_actions(text, outcomes, 100.0, 1)
    assert [(row["kind"], row["at_s"], row["what"]) for row in rows] == [
        ("stall", 10.0, "befell 3 of 3 streams"),
        ("stall", 50.0, "befell 1 of 1 streams"),
        ("drop", 60.0, "befell 1 of 2 streams"),
        ("stall", 90.0, "befell 0 of 1 streams"),
    ]
    assert [row["done"] for row in rows] == [True, True, True, False]

    # Every process of the client carries all actions out.
    [row] = log_client_actions("stall@0.1x2", outcomes, 100.0, 2)
    assert (row["num_streams"], row["what"]) == (4, "befell 4 of 4 streams")
    place = {"arm": "a", "workload": "mixed", "load": "closed:1"}
    assert not judge_chaos([{**place, "chaos": rows}])[-1].is_met


# Whole runs


def test_chaos_that_could_not_be_done_fails_the_run(server, tmp_path, capsys):
    redeploy = ["--chaos=redeploy@0.2", "--redeploy-command=echo no; exit 3"]
    redeploy.append(f"--deployment-pid={os.getpid()}")
    assert experiment(tmp_path, f"--arm=a={server.url}", *redeploy) == 1
    assert "chaos: redeploy is done" in capsys.readouterr().err
    assert "exited with 3 no" in (tmp_path / "report.html").read_text()


def test_clients_misbehave_as_asked_and_servers_are_not_blamed(server, tmp_path):
    status = experiment(
        tmp_path,
        f"--arm=a={server.url}",
        "--loads=closed:3",
        "--chaos=drop@0.2x2,stall@0.3x1=0.3",
    )
    assert status == 0
    [path] = (tmp_path / "records").glob("*.gz")
    outcomes = read_records(path).outcomes
    assert sorted(o.chaos for o in outcomes if o.chaos) == ["drop", "drop", "stall"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failed_requests"] == []
    assert results["rows"][0]["failures"] == {"client_dropped": 2}
    found = [(one["objective"], one["found"]) for one in results["objectives"]]
    assert found == [("chaos: drop is done", 2), ("chaos: stall is done", 1)]
    assert "befell 2 of 2 streams" in (tmp_path / "report.html").read_text()
