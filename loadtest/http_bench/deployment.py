"""Servers under test: started and stopped, or found running."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

import loadtest

from .arms import Arm
from .errors import LoadTestError
from .redeploy import redeploy_command

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 180.0
_READY = "Ctrl-C stops everything"
_DASHBOARD = re.compile(r"dashboard\s+(http://\S+)")
_METRICS = re.compile(r"metrics\s+(http://\S+)")
_LOG_TAIL_LINES = 15
_TIMEOUT_S = 5.0
_REPO = Path(loadtest.__file__).resolve().parents[1]
_EXPORT_PERIOD_S = 4.0
"""Of what we start: every process of Ray exports its metrics, and its agent takes them
in, so that a short period is felt beside an engine on few cores."""
_OWN_SETTLE_S = _EXPORT_PERIOD_S + 2.0
_RAY_SETTLE_S = 11.0
_VLLM_SETTLE_S = 0.5
"""Ray exports metrics every ten seconds unless told otherwise; vLLM does at once."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server that answers.

    Attributes:
        url: Root of the endpoint.
        metrics_urls: Prometheus pages.
        settle_s: How far they lag behind.
        pid: The process that all of it descends from; None for someone else's.
        dashboard: Address of Ray's dashboard, if it told us.
        headers: Of every request, e.g. an API key.
        redeploy_command: Replaces its replicas by others of the same kind; None where
            we do not know how. `{dashboard}` stands for the address.
    """

    url: str
    metrics_urls: tuple[str, ...]
    settle_s: float
    pid: int | None = None
    dashboard: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    redeploy_command: str | None = None


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts arms.

    Attributes:
        config: Deployment file for `tetris-serve up`.
        settings: `section.setting=value` for every arm that we serve.
        metrics_urls: Prometheus pages of arms that run already, by arm.
        logs: Folder for servers' output.
        deployment_pid: Of a running deployment on this machine.
        headers: Of every request, e.g. an API key.
    """

    config: str
    settings: Sequence[str]
    metrics_urls: dict[str, str]
    logs: Path
    deployment_pid: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def run(self, arm: Arm, say: Callable[[str], None]) -> Iterator[Deployment]:
        """Have an arm answer while the block runs.

        Args:
            arm: Which one.
            say: Takes lines of progress.

        Raises:
            LoadTestError: If it does not start, with the end of its log.
        """
        if arm.url is not None:
            yield self._attach(arm.url, self.metrics_urls.get(arm.name))
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{arm.file_name}.log"
        port = find_free_port()
        say(f"starting {arm.name}; its output goes to {log}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(arm, port),
                cwd=_REPO,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for us: we stop it in order.
                start_new_session=True,
            )
        try:
            yield self._wait_until_ready(arm, process, port, log)
        finally:
            stop_tree(process)

    def _command(self, arm: Arm, port: int) -> list[str]:
        if arm.command is not None:
            command = arm.command.replace("{port}", str(port))
            return ["/bin/sh", "-c", f"exec {command}"]
        # Both are made of the same settings, by the same options.
        server = "vllm" if arm.is_plain_vllm else "up"
        return [
            *(sys.executable, "-m", "serving.cli", server, "--port", str(port)),
            *self._up_arguments(arm),
        ]

    def _up_arguments(self, arm: Arm) -> list[str]:
        settings = [part for setting in self.settings for part in ("--set", setting)]
        config = str(find_config(self.config).resolve())
        return ["--config", config, *arm.up_arguments(), *settings]

    def _attach(self, url: str, metrics_url: str | None) -> Deployment:
        silence = why_silent(url, self.headers)
        if silence is not None:
            raise LoadTestError(
                f"{url}/v1/models does not answer ({silence}); start the server"
            )
        pages = (metrics_url,) if metrics_url else self._own_metrics_page(url)
        settle_s = self._settle_time(url, pages)
        return Deployment(
            url, pages, settle_s, self.deployment_pid, headers=self.headers
        )

    def _wait_until_ready(
        self, arm: Arm, process: subprocess.Popen[bytes], port: int, log: Path
    ) -> Deployment:
        url = f"http://127.0.0.1:{port}"
        is_ours = arm.command is None and not arm.is_plain_vllm
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            text = log.read_text(errors="replace")
            if is_ours:
                is_ready = _READY in text
            else:
                is_ready = why_silent(url, self.headers) is None
            if is_ready:
                break
            if process.poll() is not None or time.monotonic() > deadline_s:
                tail = "\n".join(f"  {x}" for x in text.splitlines()[-_LOG_TAIL_LINES:])
                raise LoadTestError(f"{arm.name} did not start; end of {log}:\n{tail}")
            time.sleep(0.2)
        if not is_ours:
            pages = self._own_metrics_page(url)
            settle_s = self._settle_time(url, pages)
            return Deployment(url, pages, settle_s, process.pid, headers=self.headers)
        dashboard = _DASHBOARD.search(text)
        return Deployment(
            url,
            tuple(_METRICS.findall(text)),
            _OWN_SETTLE_S,
            process.pid,
            dashboard and dashboard[1],
            self.headers,
            redeploy_command(self._up_arguments(arm)),
        )

    def _own_metrics_page(self, url: str) -> tuple[str, ...]:
        """Return the page that vLLM's server has itself, if it is there."""
        page = f"{url}/metrics"
        return () if fetch(page, url, self.headers) is None else (page,)

    def _settle_time(self, url: str, pages: Sequence[str]) -> float:
        """Return how long to wait for an exporter to show what has happened."""
        texts = (fetch(page, url, self.headers) or "" for page in pages)
        is_rays = any("\nray_" in f"\n{text}" for text in texts)
        return _RAY_SETTLE_S if is_rays else _VLLM_SETTLE_S


def find_config(name: str) -> Path:
    """Return a deployment file as `tetris-serve` finds it: here, or in the project."""
    path = Path(name).expanduser()
    return path if path.is_file() else _REPO / path


def stop_tree(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to stop as Ctrl-C does, and see to it that nothing of it is left."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def find_free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why_silent(url: str, headers: Mapping[str, str]) -> str | None:
    """Return why an endpoint does not list its models; None if it does.

    Raises:
        LoadTestError: If it answers but refuses us, which waiting does not change.
    """
    try:
        with urlopen(_request(f"{url}/v1/models", url, headers), timeout=_TIMEOUT_S):
            return None
    except HTTPError as error:
        if error.code in (401, 403):
            raise LoadTestError(
                f"{url}/v1/models: {error}; give its key with "
                "--header 'Authorization: Bearer ...'"
            ) from None
        return str(error)
    except (OSError, HTTPException, ValueError) as error:
        return str(error)


def fetch(
    page: str,
    url: str,
    headers: Mapping[str, str],
    on_problem: Callable[[str], None] = lambda _: None,
) -> str | None:
    """Return the text of a page of an endpoint or beside it; None if there is none.

    Args:
        page: Its address.
        url: Root of the endpoint; headers, which may hold a key, go nowhere else.
        headers: Of the endpoint.
        on_problem: Told why there is none.
    """
    try:
        with urlopen(_request(page, url, headers), timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, HTTPException, ValueError) as error:
        on_problem(f"{page}: {error}")
        return None


def count_replicas(url: str, headers: Mapping[str, str]) -> float | None:
    """Return the running replicas by an endpoint's `/health`; None if it tells none.

    Status 503 says 0, whoever sends it: other servers do so too when they are ill.
    """
    request = _request(f"{url}/health", url, headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as page:
            return float(json.load(page)["running_replicas"])
    except HTTPError as error:
        return 0.0 if error.code == HTTPStatus.SERVICE_UNAVAILABLE else None
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None


def _request(page: str, url: str, headers: Mapping[str, str]) -> Request:
    return Request(page, headers=dict(headers) if page.startswith(f"{url}/") else {})


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": f"{_REPO}{os.pathsep}{path}" if path else str(_REPO),
        # Else the figures of a run could be ten seconds old.
        "RAY_metrics_report_interval_ms": str(int(1e3 * _EXPORT_PERIOD_S)),
    }
