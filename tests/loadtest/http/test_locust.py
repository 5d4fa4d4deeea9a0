"""Locust by itself with our file: without a page, with it, and with workers."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.client.records import read_records
from loadtest.compare.deployment import find_free_port
from loadtest.load.arrivals import arrival_times, parse_load

from .stand_in_server import (
    CLOSE,
    WAIT_S,
    StandIn,
    chunk,
    plain_reply,
    run_stand_in,
    wait_for,
)

ROOT = Path(__file__).resolve().parents[3]
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"


@pytest.fixture
def prompts(prompt_file: Path) -> str:
    """The name of a file of prompts."""
    return str(prompt_file)


def locust(*arguments: str) -> subprocess.Popen[str]:
    """Start Locust with our file, as a user would."""
    return subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def master_options(port: str, *options: str) -> tuple[str, ...]:
    """Have Locust lead workers, without its page."""
    headless = ("--headless", "--only-summary", "--master", "--master-bind-port", port)
    return (*headless, *options)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Locust until the end of the block."""
    process = locust(*arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@dataclass
class Page:
    """Locust's web page, as its own scripts use it."""

    client: httpx.Client

    def get(self, path: str) -> Any:
        """Return what a path answers; nothing before the page is up."""
        try:
            return self.client.get(path).raise_for_status().json()
        except httpx.HTTPError:
            return {}

    def start(self, **options: object) -> Mapping[str, Any]:
        """Press Start."""
        form = {"user_count": "1", "spawn_rate": "1"}
        form |= {name: str(value) for name, value in options.items()}
        answer = self.client.post("/swarm", data=form).raise_for_status()
        return dict(answer.json())

    def run(self, **options: object) -> Mapping[str, Any]:
        """Press Start, wait for the run's end, and return the figures."""
        # The workers of the run before may still be on their way back.
        wait_for(lambda: self.start(**options)["success"])
        for state in ("running", "stopped"):
            wait_for(lambda state=state: self.get("/stats/requests")["state"] == state)
        return self.tokens()

    def tokens(self) -> dict[str, Any]:
        """Return the row of the tab Tokens."""
        [table] = self.get("/stats/requests")["extended_stats"]
        [row] = table["data"]
        return dict(row)


@contextmanager
def page(*arguments: str) -> Iterator[Page]:
    """Run Locust with its web page."""
    port = find_free_port()
    address = ("--web-host=127.0.0.1", f"--web-port={port}")
    url = f"http://127.0.0.1:{port}"
    with (
        running(*address, *arguments) as process,
        httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S) as client,
    ):
        opened = Page(client)

        def look() -> bool:
            assert process.poll() is None
            return bool(opened.get("/stats/requests"))

        wait_for(look)
        yield opened


def num_arrivals(load: str, duration_s: float) -> int:
    """Return how many requests a run with the usual seed is to send."""
    return len(list(arrival_times(parse_load(load), duration_s, "0")))


def test_statistics_have_rows_for_tokens_but_count_requests_once(tmp_path):
    replies = itertools.count()

    def script(body: Mapping[str, Any]) -> Iterator[object]:
        number = next(replies)
        if number % 3 == 1:
            yield from (chunk("a"), chunk("a"), CLOSE)
        # Every third is too late for its target, which is wide enough that a
        # busy machine does not make the others late as well.
        yield 3.5 if number % 3 == 2 else 0.0
        yield from plain_reply(0.005)(body)

    with run_stand_in(StandIn(script)) as server:
        run = locust(
            *("--headless", "--only-summary", "--host", server.url, "--load=closed:1"),
            *("--duration=60", "--requests=9", "--max-tokens=8"),
            *("--ttft-target-ms=3000", "--tpot-target-ms=5000"),
            f"--json-file={tmp_path / 'statistics'}",
            f"--csv={tmp_path / 'statistics'}",
        )
        run.communicate(timeout=WAIT_S)
    entries = json.loads((tmp_path / "statistics.json").read_text())
    rows = {entry["method"]: entry for entry in entries}
    assert {method: row["num_requests"] for method, row in rows.items()} == {
        "CHAT": 9,
        "TTFT": 9,
        "TPOT": 9,
        "ITL": rows["ITL"]["num_requests"],
        "GOOD": 3,
        "CUT": 3,
    }
    assert rows["ITL"]["num_requests"] <= 6 * 7 + 3
    assert rows["CHAT"]["total_content_length"] == 6 * 8 + 3 * 2
    # The stand-in counts 7 tokens of every prompt that it answers to the end.
    assert rows["TTFT"]["total_content_length"] == 6 * 7
    with (tmp_path / "statistics_stats.csv").open() as file:
        table = {line["Type"]: line for line in csv.DictReader(file)}
    assert table["GOOD"]["Request Count"] == table["CUT"]["Request Count"] == "3"
    assert float(table["GOOD"]["Requests/s"]) > 0
    assert table[""]["Request Count"] == "9"


def test_a_worker_that_comes_late_sends_nothing(server, tmp_path, prompts):
    port, records = str(find_free_port()), tmp_path / "records.jsonl"
    load = ("--load=paced:20", "--duration=8", "--max-tokens=2", "--expect-workers=1")
    told = (f"--workload={prompts}", f"--records={records}", "--host", server.url)
    worker = ("--worker", "--master-port", port)
    with running(*master_options(port, *load, *told)) as master, running(*worker):
        wait_for(lambda: server.bodies)
        with running(*worker):
            output = master.communicate(timeout=WAIT_S)[0]
    found = read_records(records)
    ids = [one.id for one in found.outcomes]
    assert len(ids) == len(set(ids)) == len(server.bodies) == 160, output
    # What the late one was never to send is not missing.
    assert found.num_processes == 1


class SlowToName(StandIn):
    """A stand-in that takes its time to say which models it has."""

    def answer_get(self, path: str) -> bytes | None:
        """Return the body for a path."""
        if path == "/v1/models":
            time.sleep(3.0)
        return super().answer_get(path)


def test_a_run_begins_when_its_workers_have_all_they_need(tmp_path, prompts):
    port, records = str(find_free_port()), tmp_path / "records.jsonl"
    load = ("--load=paced:10", "--duration=3", "--max-tokens=2", "--expect-workers=2")
    told = (f"--workload={prompts}", f"--records={records}", "--host")
    with (
        run_stand_in(SlowToName(plain_reply(0.005))) as server,
        running(*master_options(port, *load, *told, server.url)) as master,
        running("--worker", "--master-port", port),
        running("--worker", "--master-port", port),
    ):
        output = master.communicate(timeout=WAIT_S)[0]
    found = read_records(records)
    assert len(found.outcomes) == 30, output
    # Asking takes two seconds longer than a master's head start.
    assert max(one.send_lag_ms for one in found.outcomes) < 1500
    assert found.num_processes == 2


def test_what_a_worker_cannot_do_is_said_by_the_master(server):
    port = str(find_free_port())
    told = ("--expect-workers=1", "--host", server.url, "--workload=mixd")
    with (
        running(*master_options(port, *told)) as master,
        running("--worker", "--master-port", port),
    ):
        output = master.communicate(timeout=WAIT_S)[0]
        assert master.returncode == 2
    assert "'mixd' is no workload; choose from easy, hard" in output
    assert not server.bodies


def test_options_that_cannot_work_are_explained(server):
    run = locust("--headless", "--host", server.url, "--load=often")
    output, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 2
    assert "PROCESS:SHAPE" in output
    assert "Traceback" not in output


def test_a_start_depends_on_nothing_that_was_before(server, tmp_path, prompts):
    records = tmp_path / "records.jsonl"
    silent = f"http://127.0.0.1:{find_free_port()}"
    with page(f"--workload={prompts}", "--max-tokens=4") as opened:
        # What cannot work is said where Start was pressed, and in Locust's list.
        failed = opened.start(host=silent, load="closed:8", duration=2)
        assert not failed["success"]
        assert f"{silent}/v1/models names no model" in failed["message"]
        [exception] = opened.get("/exceptions")["exceptions"]
        assert exception["msg"] == failed["message"]
        wrong = opened.start(host=server.url, load="often")
        assert not wrong["success"]
        assert "PROCESS:SHAPE" in wrong["message"]

        first = opened.run(host=server.url, load="closed:8", duration=5)
        num_first = len(server.bodies)
        assert num_first > 100
        assert first["requests_per_s"] > 10
        # Its last request comes more than a second before its end.
        second = opened.run(load="paced:ramp:4-0", duration=7, records=records)
        assert opened.get("/exceptions")["exceptions"] == []
        assert opened.get("/stats/requests")["stats"][-1]["num_requests"] == 14

    # Its own arrivals alone: no user of the closed loop sends among them.
    assert len(server.bodies) - num_first == 14
    assert len(read_records(records).outcomes) == 14
    assert second["ttft_p95_ms"] > 0


def test_the_page_shows_tokens_and_stop_ends_an_open_load_at_once(server, prompts):
    """What is in flight is answered; nothing is sent while Locust waits for that."""
    load = ("--load=poisson:20", "--duration=600", "--drain=30", "--max-tokens=4")
    with page(f"--host={server.url}", f"--workload={prompts}", *load) as opened:
        wait_for(lambda: opened.start()["success"])
        wait_for(lambda: len(server.bodies) > 100)
        wait_for(lambda: opened.tokens()["tokens_out_per_s"])
        wait_for(lambda: opened.tokens()["client_lag_ms"] is not None)
        # What Locust's page makes a table of; without it the whole page stays empty.
        main_page = opened.client.get("/").text.replace("&#34;", '"')
        assert '"structure"' in main_page
        assert "TTFT p95 ms" in main_page
        # Locust would say that it has started, and change nothing.
        again = opened.start(load="closed:1")
        assert not again["success"]
        assert "has not ended" in again["message"]
        num_sent = len(server.bodies)
        opened.client.post("/stop").raise_for_status()
        wait_for(lambda: opened.get("/stats/requests")["state"] == "stopped")
        # Another 30 s of arrivals would be 600.
        assert len(server.bodies) < num_sent + 200
        row = opened.tokens()
        assert (row["failed"], row["cut"]) == (0, 0)
        assert row["goodput_per_s"] == row["requests_per_s"] > 0


def test_workers_are_there_for_the_next_run(server, tmp_path, prompts):
    port = str(find_free_port())
    files = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    loads = "closed:4", "poisson:5"
    with page(
        *("--master", "--master-bind-port", port, "--host", server.url),
        # A worker would wait that long before it is there again.
        *(f"--workload={prompts}", "--max-tokens=4", "--drain=200"),
    ) as opened:
        alone = opened.start(load="closed:4", duration=2)
        assert not alone["success"]
        assert "no worker is connected" in alone["message"]
        with running("--worker", "--master-port", port):
            wait_for(lambda: opened.get("/worker-count")["worker_count"])
            wrong = opened.start(workload="mixd")
            assert not wrong["success"]
            assert "'mixd' is no workload" in wrong["message"]
            began_s = time.monotonic()
            for load, file in zip(loads, files, strict=True):
                opened.run(load=load, duration=4, records=file, workload=prompts)
            assert time.monotonic() - began_s < 150
    first, second = (read_records(file) for file in files)
    # A run's records hold it all, and nothing of another.
    assert len(first.outcomes) + len(second.outcomes) == len(server.bodies)
    assert len(second.outcomes) == num_arrivals("poisson:5", 4)
    assert first.num_processes == second.num_processes == 1
