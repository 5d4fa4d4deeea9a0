"""Whole deployments in processes of their own, driven as users drive them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadtest.compare.deployment import find_free_port
from serving.settings.key_file import KeyEntry, hash_key, make_key, write_keys
from tests.conftest import find_worker
from tests.serving.span_collector import SpanCollector

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DEMO_CONFIG = ROOT / "configs" / "tiny.yaml"
MODEL = "demo"
AS_IN_IMAGE = str(Path(__file__).with_name("as_in_image"))

T = TypeVar("T")

STREAM_INTERVAL_S = 0.1
"""Of the shared deployment: several steps, even of the demo pair."""

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 180

_given_ports: set[int] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what shares one deployment last, and what ends it after all of that."""
    places = {"fleet": 1, "ending_fleet": 1, "server": 3, "ending_server": 1}

    def order(item: pytest.Item) -> int:
        fixtures = getattr(item, "fixturenames", ())
        return sum(place for name, place in places.items() if name in fixtures)

    items.sort(key=order)


def wait_until(
    condition: Callable[[], T], timeout_s: float, period_s: float = 0.5
) -> T:
    deadline_s = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(period_s)
    return result


def find_free_ports(count: int) -> list[int]:
    """Find ports that nobody listens on, and that nobody was given before.

    Tests that run beside each other have others.
    """
    worker, num_workers = find_worker()
    ports: list[int] = []
    while len(ports) < count:
        port = find_free_port(20_000 + worker, num_workers)
        if port not in _given_ports:
            _given_ports.add(port)
            ports.append(port)
    return ports


def is_listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell, with metrics exported every second."""
    others = ("RAY_", "PORT", "VLLM_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    env |= {"RAY_metrics_report_interval_ms": "1000", "RAY_worker_niceness": "0"}
    env |= extra
    paths = env.get("PYTHONPATH"), AS_IN_IMAGE
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass
class Command:
    """A command that runs in the background, with all that it starts.

    `start_new_session` keeps a Ctrl-C meant for it away from pytest.
    """

    process: subprocess.Popen[bytes]
    output_file: Path

    @classmethod
    def start(cls, args: list[str], output_file: Path, **env: str) -> Self:
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                args,
                cwd=ROOT,
                env=clean_environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, output_file)

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> str:

        def found() -> bool:
            if re.search(pattern, self.output):
                return True
            assert self.process.poll() is None, self.output
            return False

        wait_until(found, timeout_s)
        return self.output

    def descendants(self) -> list[psutil.Process]:
        """Every process the command has started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def end(self) -> None:
        """Kill it and all that it has started, whatever a test has done.

        To stop in order, which some tests are about, takes it half a minute.
        """
        if self.process.poll() is not None:
            return
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = self.descendants()
        self.process.kill()
        self.process.wait()
        for process in filter(psutil.Process.is_running, family):
            # They may end by themselves, now that their parents are gone.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@dataclass
class Server:
    command: Command
    port: int
    metrics_port: int
    key: str = ""

    @property
    def url(self) -> str:
        """Root of the endpoint, for who sends a key as browsers do."""
        user = f"test:{self.key}@" if self.key else ""
        return f"http://{user}127.0.0.1:{self.port}"

    def health(self) -> tuple[int, dict[str, Any]]:
        """What it says of itself; status 0 if nobody answers."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=60, trust_env=False)
            return answer.status_code, answer.json() if answer.content else {}
        except (httpx.HTTPError, ValueError):
            return 0, {}

    def num_replicas(self) -> int:
        return int(self.health()[1].get("running_replicas", 0))

    def complete(self, timeout: float = 300, **fields: Any) -> httpx.Response:
        """A completion; of a fixed length if it is to ignore the model's end."""
        body = {"model": MODEL, "prompt": "one two three"} | fields
        return self.post("/v1/completions", json=body, timeout=timeout)

    def stream(self, max_tokens: int, **options: Any) -> openai.Stream[Any]:
        """A completion of so many tokens, by a stock client, piece by piece."""
        return self.client().completions.create(
            model=MODEL,
            prompt="one two three",
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
            **options,
        )

    def client(self, **options: Any) -> openai.OpenAI:
        """A stock client that fails at once instead of retrying."""
        options = {"max_retries": 0, "timeout": 300} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """A request without any client-side validation."""
        # Reading all certificates for every plain request would make tests the limit.
        options = {"timeout": 300, "trust_env": False, "verify": False} | options
        return httpx.post(f"{self.url}{path}", **options)

    def scrape(self) -> list[Sample]:
        """All samples, as Prometheus would scrape them: a long page."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = httpx.get(url, timeout=60, trust_env=False).text
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]

    def samples(self, name: str) -> list[Sample]:
        return [sample for sample in self.scrape() if sample.name == name]

    def total(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self.samples(name)
            if labels.items() <= sample.labels.items()
        )


@contextmanager
def load(
    server: Server, num_clients: int, max_tokens: int = 200
) -> Iterator[list[int]]:
    """Keep clients sending requests; yields the status codes seen so far."""
    stop = threading.Event()
    statuses: list[int] = []

    def send() -> None:
        while not stop.is_set():
            response = server.complete(max_tokens=max_tokens, ignore_eos=True)
            statuses.append(response.status_code)
            if response.status_code == 503:
                assert response.json()["error"]["type"] == "ServiceUnavailableError"
                stop.wait(float(response.headers["retry-after"]))

    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(send) for _ in range(num_clients)]
        try:
            yield statuses
        finally:
            stop.set()
    for client in clients:
        client.result()


def read_logs(server: Server, pattern: str = "*.log") -> str:
    files = sorted(find_log_folder(server).rglob(pattern))
    return "\n".join(file.read_text(errors="replace") for file in files)


def find_log_folder(server: Server) -> Path:
    (folder,) = re.findall(r"^  logs +(/.*)$", server.command.output, re.MULTILINE)
    return Path(folder)


def up_command(settings: dict[str, Any]) -> tuple[list[str], int, int]:
    """Return `tetris-serve up` on the demo pair, its port, and that of its metrics."""
    port, dashboard_port, metrics_port = find_free_ports(3)
    chosen = {
        "http.dashboard_port": dashboard_port,
        "http.metrics_port": metrics_port,
        **settings,
    }
    options = [f"--config={DEMO_CONFIG}", f"--port={port}"]
    options += [f"--set={name}={value}" for name, value in chosen.items()]
    return [str(BIN / "tetris-serve"), "up", *options], port, metrics_port


@contextmanager
def start_up_command(
    output_file: Path, settings: dict[str, Any], **env: str
) -> Iterator[Server]:
    """Run it, once it is ready, and end it afterwards."""
    args, port, metrics_port = up_command(settings)
    with Command.start(args, output_file, **env) as command:
        command.wait_for("Ctrl-C stops everything")
        yield Server(command, port, metrics_port)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two fronts and two replicas, in float32: no token depends on its neighbours.

    They ask for API keys, and nobody receives their spans.
    """
    folder, key = tmp_path_factory.mktemp("fleet"), make_key()
    keys_file = folder / "keys.json"
    write_keys(keys_file, {"test": KeyEntry(sha256=hash_key(key))})
    with start_up_command(
        folder / "up.log",
        {
            "engine.dtype": "float32",
            # Fewer than there are streams, so that both replicas have some.
            "engine.max_num_seqs": 10,
            "engine.extra.otlp_traces_endpoint": "http://collector.invalid:4317",
            "replicas.min": 2,
            "replicas.max": 2,
            "replicas.engine_hang_timeout_s": 10,
            "http.fronts.min": 2,
            "http.fronts.max": 2,
            "http.access.keys_file": keys_file,
        },
    ) as running:
        running.key = key
        yield running


@pytest.fixture(scope="session")
def undisturbed(fleet: Server) -> list[Any]:
    from tests.serving.fleet import run_all, when_both_are_ready

    when_both_are_ready(fleet)
    return run_all(fleet)


@pytest.fixture
def ending_fleet(fleet: Server) -> Server:
    return fleet


@pytest.fixture(scope="session")
def collector() -> Iterator[SpanCollector]:
    running = SpanCollector()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, collector: SpanCollector
) -> Iterator[Server]:
    """One deployment for all tests that only talk to it.

    It starts with one replica and may grow to two; it never shrinks meanwhile.
    """
    with start_up_command(
        tmp_path_factory.mktemp("server") / "up.log",
        {
            # Its budget is the same in every step, so that tests can reckon with it.
            "policy.name": "tetris",
            "policy.draft_tokens": 2,
            "policy.max_draft_tokens": 4,
            # Drafts hardly pay for models as small as these, and are looked at.
            "policy.audit": 0,
            "engine.max_num_seqs": 8,
            "replicas.max": 2,
            "replicas.target_ongoing_requests": 4,
            "replicas.max_ongoing_requests": 8,
            # Serve counts a request as queued while it assigns it, free slot or not.
            "replicas.max_queued_requests": 16,
            "replicas.upscale_delay_s": 1,
            "replicas.downscale_delay_s": 3600,
            "engine.extra.otlp_traces_endpoint": collector.url,
            # A replica's vLLM sees no tokens, takes itself for idle, and sums up so.
            "engine.env.VLLM_LOGGING_LEVEL": "DEBUG",
            "http.board": "true",
            "http.stream_interval_ms": 1e3 * STREAM_INTERVAL_S,
        },
    ) as running:
        yield running


@pytest.fixture
def ending_server(server: Server) -> Server:
    return server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()
