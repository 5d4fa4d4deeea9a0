"""Servers under test: started and stopped, or found running."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.client.endpoint import Endpoint
from loadtest.environment import REPO
from loadtest.errors import LoadTestError
from loadtest.result_folder import read_tail

from .arms import Arm
from .processes import role_of

_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 180.0
_READY = "Ctrl-C stops everything"
_METRICS = re.compile(r"metrics\s+(http://\S+)")
EXPORT_PERIOD_S = 4.0
"""Of what we start: every process of Ray exports its metrics, and its agent takes them
in, so that a short period is felt beside an engine on few cores."""

RAY_EXPORT_PERIOD_S = 10.0
"""Ray's own default."""

_OWN_LAG_S = 2.0
_VLLM_SETTLE_S = 0.5
"""Of a server that exports its metrics at once."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server that answers, and how far its Prometheus pages lag behind.

    All of it descends from `pid`, if it is ours.
    """

    endpoint: Endpoint
    metrics_urls: tuple[str, ...] = ()
    settle_s: float = 0.0
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts arms, from a deployment file and `section.setting=value`."""

    logs: Path
    config: str = ""
    settings: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    export_period_s: float = EXPORT_PERIOD_S

    @contextmanager
    def run(self, arm: Arm, say: Callable[[str], None]) -> Iterator[Deployment]:
        """Have an arm answer while the block runs; where it does not, tell its log."""
        if arm.url is not None:
            endpoint = Endpoint(arm.url, self.headers)
            silence = endpoint.why_silent()
            if silence is not None:
                raise LoadTestError(
                    f"{arm.url}/v1/models does not answer ({silence}); start the server"
                )
            yield _describe(endpoint, None)
            return
        log, port = self.logs / f"{arm.file_name}.log", find_free_port()
        say(f"starting {arm.name}; its output goes to {log}")
        # Else the figures of a run could be ten seconds old.
        period_ms = str(int(1e3 * self.export_period_s))
        env = os.environ | {"RAY_metrics_report_interval_ms": period_ms}
        with run_logged(self._command(arm, port), log, env) as process:
            yield self._wait_until_ready(arm, process, port, log)

    def _command(self, arm: Arm, port: int) -> list[str]:
        if arm.command is not None:
            shell = arm.command.replace("{port}", str(port))
            return ["/bin/sh", "-c", f"exec {shell}"]
        # Both are made of the same settings, by the same options.
        server = "vllm" if arm.is_plain_vllm else "up"
        command = [sys.executable, "-m", "serving.cli", server, "--port", str(port)]
        settings = [part for setting in self.settings for part in ("--set", setting)]
        config = str(find_config(self.config).resolve())
        return [*command, "--config", config, *arm.up_arguments(), *settings]

    def _wait_until_ready(
        self, arm: Arm, process: subprocess.Popen[bytes], port: int, log: Path
    ) -> Deployment:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", self.headers)
        is_ours = not arm.is_plain_vllm
        if arm.command is not None:
            # One of our servers answers before all its fronts are there.
            is_ours = role_of(arm.command) == "up"
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            text = log.read_text(errors="replace")
            if _READY in text if is_ours else endpoint.why_silent() is None:
                break
            if process.poll() is not None or time.monotonic() > deadline_s:
                tail = read_tail(log)
                raise LoadTestError(f"{arm.name} did not start; end of {log}:\n{tail}")
            time.sleep(0.2)
        if not is_ours:
            return _describe(endpoint, process.pid)
        pages = tuple(_METRICS.findall(text))
        settle_s = self.export_period_s + _OWN_LAG_S
        return Deployment(endpoint, pages, settle_s, process.pid)


def _describe(endpoint: Endpoint, pid: int | None) -> Deployment:
    """Find the Prometheus page of a server that is not ours, if it has one."""
    page = f"{endpoint.url}/metrics"
    pages = (page,) if endpoint.fetch(page) is not None else ()
    return Deployment(endpoint, pages, _VLLM_SETTLE_S, pid)


def find_config(name: str) -> Path:
    """Return a deployment file as `tetris-serve` finds it: here, or in the project."""
    path = Path(name).expanduser()
    return path if path.is_file() else REPO / path


@contextmanager
def run_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str] = os.environ
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block runs; then nothing of it is left.

    It finds this project's packages, and is asked to stop as Ctrl-C does.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(REPO), env.get("PYTHONPATH"))))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env={**env, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for us: we stop it in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        # Locust's workers may outlive the process that started them.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def find_free_port(first: int = 20_000, step: int = 1) -> int:
    """Return a port that nobody listens on, nor will by chance.

    It is bound half a minute later, when Ray has opened dozens of its own. So it is
    neither among those that Linux hands out unasked, from 32768, nor among those of
    Ray's workers, from 10002 to 19999, or of Serve's replicas, from 30000 to 31000.

    Args:
        first: The lowest that it may be.
        step: Between those that it may be, for others who choose beside.
    """
    while True:
        port = random.SystemRandom().randrange(first, 30_000, step)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
