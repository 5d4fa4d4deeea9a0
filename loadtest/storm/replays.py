"""How often each stream was replayed, as the fronts log it at its end."""

import json
import re
from pathlib import Path
from typing import Final

from loadtest.compare.processes import find_processes
from loadtest.errors import LoadTestError

_ENDED: Final = re.compile(r" (\S+) -- Request ended: (\{.*\})$", re.MULTILINE)


def find_logs(pid: int) -> Path:
    """Return the folder into which the Ray below a process logs."""
    for role, process in find_processes(pid):
        if role == "gcs":
            for word in process.cmdline():
                name, _, value = word.partition("=")
                if name == "--log_dir":
                    return Path(value)
    raise LoadTestError("Ray's gcs_server does not run, or does not say where it logs")


def read_replays(logs: Path) -> dict[str, int]:
    """Return how often requests were replayed that have ended, by their clients' ids.

    Of several answers to one request the one that was replayed most counts. What its
    front has taken along has no line.
    """
    replays: dict[str, int] = {}
    for file in logs.glob("serve/*TetrisFront*.log"):
        for request_id, told in _ENDED.findall(file.read_text(errors="replace")):
            number = json.loads(told)["replays"]
            replays[request_id] = max(number, replays.get(request_id, 0))
    return replays
