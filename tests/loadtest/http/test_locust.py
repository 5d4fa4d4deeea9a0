"""Locust by itself with our file: without a page, with it, and with workers."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

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


@contextmanager
def locust(*arguments: str, cwd: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_alone(*arguments: str) -> tuple[int, str]:
    with locust("--headless", "--only-summary", *arguments) as process:
        output, _ = process.communicate(timeout=WAIT_S)
    return process.returncode, output


@dataclass
class Page:
    """Locust's web page, as its own scripts use it."""

    client: httpx.Client

    def get(self, path: str) -> Any:
        try:
            return self.client.get(path).raise_for_status().json()
        except httpx.HTTPError:
            return {}

    def stats(self) -> dict[str, Any]:
        return dict(self.get("/stats/requests"))

    def start(self, **options: object) -> None:
        form = {"user_count": "1", "spawn_rate": "1"}
        form |= {name: str(value) for name, value in options.items()}
        answer = self.client.post("/swarm", data=form).raise_for_status()
        assert answer.json()["success"]

    def why_not(self, **options: object) -> str:
        before = len(self.get("/exceptions")["exceptions"])
        self.start(**options)
        wait_for(lambda: len(self.get("/exceptions")["exceptions"]) > before)
        wait_for(lambda: self.stats()["state"] in ("ready", "stopped"))
        return str(self.get("/exceptions")["exceptions"][-1]["msg"])

    def begin(self, **options: object) -> None:
        def has_begun() -> bool:
            # Locust says "stopped" up to a second before it is done with a run, and
            # until then takes no notice of Start; nor does it once a run has begun.
            self.start(**options)
            return self.stats()["state"] in ("running", "spawning")

        wait_for(has_begun)

    def run(self, **options: object) -> None:
        self.begin(**options)
        wait_for(lambda: self.stats()["state"] in ("stopped", "ready"))

    def rows(self) -> dict[str, dict[str, Any]]:
        return {str(row["method"]): row for row in self.stats()["stats"]}


@contextmanager
def open_page(*arguments: str) -> Iterator[Page]:
    port = find_free_port()
    address = ("--web-host=127.0.0.1", f"--web-port={port}")
    url = f"http://127.0.0.1:{port}"
    with (
        locust(*address, *arguments) as process,
        httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S) as client,
    ):
        page = Page(client)
        wait_for(lambda: page.stats() or process.poll() is not None)
        yield page


def test_statistics_have_rows_for_tokens_but_count_requests_once(tmp_path, prompt_file):
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
        run_alone(
            *("--host", server.url, "--load=paced:3", "--duration=3"),
            *(f"--workload={prompt_file}", "--max-tokens=8", "--ttft-target-ms=3000"),
            *("--tpot-target-ms=5000", f"--json-file={tmp_path / 'statistics'}"),
        )
    entries = json.loads((tmp_path / "statistics.json").read_text())
    rows = {entry["method"]: entry for entry in entries}
    counts = {method: row["num_requests"] for method, row in rows.items()}
    assert counts.pop("ITL") <= 6 * 7 + 3
    assert counts == {"CHAT": 9, "TTFT": 9, "TPOT": 9, "GOOD": 3, "CUT": 3}
    assert rows["CHAT"]["total_content_length"] == 6 * 8 + 3 * 2
    # The stand-in counts 7 tokens of every prompt that it answers to the end.
    assert rows["TTFT"]["total_content_length"] == 6 * 7


def test_options_that_cannot_work_are_explained(server):
    status, output = run_alone("--host", server.url, "--load=often")
    assert status == 2
    assert "PROCESS:SHAPE" in output
    assert "Traceback" not in output
    assert not server.bodies


def master_and_workers(port: int) -> tuple[list[str], list[str]]:
    master = ["--headless", "--only-summary", "--master", f"--master-bind-port={port}"]
    return master, ["--worker", f"--master-port={port}"]


def test_a_run_is_that_of_the_workers_that_were_there_when_it_began(
    server, tmp_path, prompt_file
):
    records = tmp_path / "records.jsonl"
    load = ("--load=paced:20", "--duration=8", "--max-tokens=2", "--expect-workers=2")
    told = (f"--workload={prompt_file}", f"--records={records}", "--host", server.url)
    leads, works = master_and_workers(find_free_port())
    with ExitStack() as stack:
        master = stack.enter_context(locust(*leads, *load, *told))
        for _ in range(2):
            stack.enter_context(locust(*works))
        wait_for(lambda: server.bodies)
        stack.enter_context(locust(*works))
        output = master.communicate(timeout=WAIT_S)[0]
    found = read_records(records)
    ids = [one.id for one in found.outcomes]
    assert len(ids) == len(set(ids)) == len(server.bodies) == 160, output
    # What the late one was never to send is not missing.
    assert found.num_processes == 2
    # What takes a while is done before the clock starts: no worker asks again.
    assert server.pages == ["/v1/models"]


def test_what_a_worker_cannot_do_is_said_by_the_master(server, tmp_path):
    (tmp_path / "mine.txt").write_text("known to the master alone")
    leads, works = master_and_workers(find_free_port())
    told = ("--expect-workers=1", "--host", server.url, "--workload=mine.txt")
    with locust(*leads, *told, cwd=tmp_path) as master, locust(*works):
        output = master.communicate(timeout=WAIT_S)[0]
        assert master.returncode == 2
    assert "'mine.txt' is no workload; choose from easy, hard" in output
    assert not server.bodies


def test_a_start_depends_on_nothing_that_was_before(server, tmp_path, prompt_file):
    records = tmp_path / "records.jsonl"
    silent = f"http://127.0.0.1:{find_free_port()}"
    with open_page(f"--workload={prompt_file}", "--max-tokens=4") as page:
        why = page.why_not(host=silent, load="closed:8", duration=2)
        assert f"{silent}/v1/models names no model" in why
        assert "PROCESS:SHAPE" in page.why_not(host=server.url, load="often")

        page.run(host=server.url, load="closed:8", duration=5)
        num_first = len(server.bodies)
        assert num_first > 100
        assert page.rows()["CHAT"]["current_rps"] > 10
        # Its last request comes more than a second before its end.
        page.run(load="paced:ramp:4-0", duration=7, records=records)
        assert page.stats()["stats"][-1]["num_requests"] == 14
        assert page.rows()["TTFT"]["response_time_percentile_0.95"] > 0
        # Its own arrivals alone: no user of the closed loop sends among them.
        assert len(server.bodies) - num_first == 14
        assert len(read_records(records).outcomes) == 14

        # Stop: what is in flight is answered, and nothing sent while Locust waits.
        page.begin(load="poisson:20", duration=600, drain=30)
        wait_for(lambda: len(server.bodies) - num_first > 100)
        num_sent = len(server.bodies)
        page.client.post("/stop").raise_for_status()
        wait_for(lambda: page.stats()["state"] == "stopped")
        # Another 30 s of arrivals would be 600.
        assert len(server.bodies) < num_sent + 200
        rows = page.rows()
        assert rows["CUT"]["num_requests"] == rows["CHAT"]["num_failures"] == 0
        assert rows["GOOD"]["num_requests"] == rows["CHAT"]["num_requests"] > 80


def test_workers_are_there_for_the_next_run(server, tmp_path, prompt_file):
    port, files = find_free_port(), [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    with open_page(
        *("--master", "--master-bind-port", str(port), "--host", server.url),
        # A worker would wait that long before it is there again.
        *(f"--workload={prompt_file}", "--max-tokens=4", "--drain=200"),
    ) as page:
        assert "no worker is connected" in page.why_not(load="closed:4")
        with locust(*master_and_workers(port)[1]):
            began_s = time.monotonic()
            for load, file in zip(("closed:4", "poisson:5"), files, strict=True):
                wait_for(
                    lambda: [w["state"] for w in page.stats()["workers"]] == ["ready"]
                )
                page.run(load=load, duration=4, records=file)
            assert time.monotonic() - began_s < 150
    first, second = (read_records(file) for file in files)
    # A run's records hold it all, and nothing of another.
    assert len(first.outcomes) + len(second.outcomes) == len(server.bodies)
    assert len(second.outcomes) == len(arrival_times(parse_load("poisson:5"), 4, "0"))
    assert first.num_processes == second.num_processes == 1
