"""The logs of this machine's Ray, which may remove any of them while they are read."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

EXCEPTION: Final = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt): .+")
"""The last line of a traceback."""

_MAX_CAUSES: Final = 5
_PROCESS_PREFIX = re.compile(r"^\(\w+[^)]* pid=\d+\) (?:ERROR [^\]]*\] ?)?")
_SYMPTOMS: Final = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore failed to start",
    "Failed core proc",
    "ActorDiedError",
    "please check the stack trace above",
)
"""Messages by which vLLM and Ray say that something else has failed before."""


def find_logs() -> Path:
    """Return the folder of the logs of this machine's latest Ray."""
    root = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    return root / "ray" / "session_latest" / "logs"


def changed_at(path: Path) -> float:
    """Return when a file was last written to, seconds since 1970; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def find_root_causes(log_dir: Path) -> list[str]:
    """Find the exceptions behind a failed start in the logs of Ray's workers.

    vLLM's engine runs in processes of its own, so the replica's own exception only
    says that they failed.

    Args:
        log_dir: Folder of the Ray session's logs.

    Returns:
        The last distinct exception lines, oldest first; symptoms are left out.
    """
    causes: dict[str, None] = {}
    for file in sorted(log_dir.glob("worker-*.*"), key=changed_at):
        with contextlib.suppress(OSError):
            for line in _exception_lines(file):
                if not any(symptom in line for symptom in _SYMPTOMS):
                    causes.setdefault(line)
    return list(causes)[-_MAX_CAUSES:]


def _exception_lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = _PROCESS_PREFIX.sub("", line.strip()).strip()
            if EXCEPTION.match(text):
                yield text[:500]
