"""Whole runs with chaos: the command, real Locust, a stand-in."""

from __future__ import annotations

import json
import os

from loadtest.client.records import read_records

from .test_experiment import experiment


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


def test_misbehaviour_that_befell_nobody_fails_the_run(server, tmp_path, capsys):
    few = ["--loads=closed:1", "--requests=3", "--duration=60"]
    chaos = "--chaos=stall@0.9x1"
    assert experiment(tmp_path, f"--arm=a={server.url}", *few, chaos) == 1
    assert "befell 0 of 1 streams" in capsys.readouterr().err
