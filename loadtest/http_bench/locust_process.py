"""Runs Locust in a process of its own; gevent's patches stay there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

import loadtest

from .deployment import find_free_port, stop_tree
from .errors import LoadTestError
from .experiment import Cell, Traffic
from .options import HEADER_VARIABLE
from .summary import Targets

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_REPO = Path(loadtest.__file__).resolve().parents[1]
_PERIOD_S = 0.2
_SPARE_S = 90.0
_LOG_TAIL_LINES = 12


def run_locust(
    url: str,
    cell: Cell,
    traffic: Traffic,
    targets: Targets,
    *,
    seed: str,
    run_id: str,
    records: Path,
    log: Path,
    client_chaos: str = "",
    on_begin: Callable[[float], None] = lambda _: None,
    on_wait: Callable[[float], None] = lambda _: None,
) -> None:
    """Put load on an endpoint and wait for the end.

    Args:
        url: Root of the endpoint.
        cell: Workload and load.
        traffic: The rest of what is sent.
        targets: For Locust's live figures.
        seed: Of prompts and arrivals.
        run_id: Begins request ids.
        records: Where outcomes go.
        log: Where Locust's own words go.
        client_chaos: What clients do to their streams.
        on_begin: Told once when the run began, by the wall clock.
        on_wait: Told the seconds since then, several times a second.

    Raises:
        LoadTestError: If Locust fails or does not end, with the end of its log.
    """
    options = {
        "--host": url,
        "--load": cell.load.name,
        "--workload": cell.workload,
        "--model": traffic.model,
        "--duration": traffic.duration_s,
        "--requests": traffic.num_requests,
        "--drain": traffic.drain_s,
        "--max-tokens": traffic.max_tokens,
        "--temperature": traffic.temperature,
        "--seed": seed,
        "--extra-body": traffic.extra_body,
        "--max-prompt-chars": traffic.max_prompt_chars,
        "--ttft-target-ms": targets.ttft_ms or 0,
        "--tpot-target-ms": targets.tpot_ms or 0,
        "--run-id": run_id,
        "--records": records.absolute(),
        "--client-chaos": client_chaos,
    }
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless"]
    command += ["--only-summary", "--exit-code-on-error", "0"]
    command += [f"{name}={value}" for name, value in options.items()]
    if traffic.processes > 1:
        command += ["--processes", str(traffic.processes)]
        # Not Locust's usual port: somebody else's workers may look for a master there.
        port = str(find_free_port())
        command += ["--master-port", port, "--master-bind-port", port]
    records.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=_REPO,
            env=_environment(traffic.header),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if traffic.nice is not None:
            _set_priority(process.pid, traffic.nice)
        _wait(process, traffic, records, log, on_begin, on_wait)
    finally:
        stop_tree(process)
        # Workers may outlive the process that started them.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _set_priority(pid: int, nice: int) -> None:
    """Set a process's priority before it has started anything itself."""
    try:
        psutil.Process(pid).nice(nice)
        # Linux may group processes by session first, and compares priorities only
        # within a group: the client's is a group of its own.
        with suppress(FileNotFoundError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except (psutil.AccessDenied, PermissionError):
        raise LoadTestError(
            f"--client-nice {nice} needs privileges; leave it out"
        ) from None
    except psutil.NoSuchProcess:
        return  # Its end is explained from its log.


def _wait(
    process: subprocess.Popen[bytes],
    traffic: Traffic,
    records: Path,
    log: Path,
    on_begin: Callable[[float], None],
    on_wait: Callable[[float], None],
) -> None:
    limit_s = traffic.duration_s + traffic.drain_s + _SPARE_S
    started_s = time.monotonic()
    epoch_s: float | None = None
    while process.poll() is None:
        if time.monotonic() - started_s > limit_s:
            raise _failure(f"has not ended after {limit_s:.0f} s", log)
        if epoch_s is None:
            epoch_s = _read_epoch(records)
            if epoch_s is not None:
                on_begin(epoch_s)
        else:
            on_wait(time.time() - epoch_s)
        time.sleep(_PERIOD_S)
    if process.returncode != 0 or not records.exists():
        raise _failure(f"failed with {process.returncode}", log)


def _read_epoch(records: Path) -> float | None:
    try:
        with records.open() as file:
            line = file.readline()
        return float(json.loads(line)["run"]["epoch_s"])
    except (OSError, ValueError, KeyError):
        return None  # Not there yet, or not whole.


def _failure(what: str, log: Path) -> LoadTestError:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    tail = "\n".join(f"  {line}" for line in lines)
    return LoadTestError(f"Locust {what}; the end of {log}:\n{tail}")


def _environment(header: str) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    own = {k: v for k, v in os.environ.items() if not k.startswith("LOCUST_")}
    return own | {
        HEADER_VARIABLE: header,
        "PYTHONPATH": f"{_REPO}{os.pathsep}{path}" if path else str(_REPO),
    }
