"""Runs Locust in a process of its own; gevent's patches stay there."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from loadtest.environment import REPO
from loadtest.errors import LoadTestError
from loadtest.load.options import HEADER_VARIABLE, OPTIONS, LoadOptions
from loadtest.result_folder import read_tail

from .deployment import find_free_port, run_logged

_LOCUSTFILE = REPO / "loadtest" / "locustfile.py"
_SPARE_S = 90.0


def run_locust(
    options: LoadOptions, log: Path, *, processes: int = 1, nice: int | None = None
) -> None:
    """Put load on an endpoint and wait for the end; the options must name `records`."""
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless"]
    command += ["--only-summary", "--exit-code-on-error=0", f"--host={options.host}"]
    command += [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in OPTIONS.keys() - {"header"}
    ]
    if processes > 1:
        # Not Locust's usual port: somebody else's workers may look for a master there.
        port = find_free_port()
        command += [f"--processes={processes}", f"--master-port={port}"]
        command += [f"--master-bind-port={port}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("LOCUST_")}
    records = Path(options.records)
    records.unlink(missing_ok=True)
    limit_s = options.duration + options.drain + _SPARE_S
    with run_logged(command, log, env | {HEADER_VARIABLE: options.header}) as process:
        if nice is not None:
            _set_priority(process.pid, nice)
        what = f"has not ended after {limit_s:.0f} s"
        with suppress(subprocess.TimeoutExpired):
            what = f"failed with {process.wait(limit_s)}"
    if process.returncode != 0 or not records.exists():
        raise LoadTestError(f"Locust {what}; the end of {log}:\n{read_tail(log)}")


def _set_priority(pid: int, nice: int) -> None:
    """Set a process's priority before it has started anything itself."""
    # One that has ended is explained from its log.
    with suppress(psutil.NoSuchProcess):
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
