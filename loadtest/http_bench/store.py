"""What has been measured so far, on disk, so that an experiment can go on in pieces."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import LoadTestError

RECORD_FOLDER = "records"
LOG_FOLDER = "logs"
_SETTINGS_FILE = "settings.json"
_ENVIRONMENT_FILE = "environment.json"
_RUNS_FILE = "runs.jsonl"
OUTPUT_FILES = ("results.json", "runs.csv", "report.html")
_OWN_FILES = (_SETTINGS_FILE, _ENVIRONMENT_FILE, _RUNS_FILE, *OUTPUT_FILES)

RunKey = tuple[int, str, str, str]
"""Round, arm, workload, load."""


class Store:
    """An output folder. A run is kept whole or not at all."""

    def __init__(self, folder: Path) -> None:
        """Open a folder; created if missing."""
        self.folder = folder
        (folder / RECORD_FOLDER).mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove everything that an experiment writes, and nothing else."""
        for name in _OWN_FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in (RECORD_FOLDER, LOG_FOLDER):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / RECORD_FOLDER).mkdir(parents=True)

    def check_conditions(self, conditions: Mapping[str, Any]) -> None:
        """Note the conditions of a new experiment, or compare those of one resumed.

        Raises:
            LoadTestError: If what is in the folder was measured under others.
        """
        now = json.loads(json.dumps(conditions))
        before = self.read(_SETTINGS_FILE)
        if before is None or not self.runs():
            self.write(_SETTINGS_FILE, json.dumps(now, indent=1) + "\n")
            return
        changed = [
            f"  {key}: was {before.get(key)!r}, is {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise LoadTestError(
                f"--output {self.folder} holds results measured under other "
                "conditions:\n" + "\n".join(changed) + "\n"
                "Put them back, choose another --output, or discard what is there "
                "with --restart"
            )

    def conditions(self) -> dict[str, Any] | None:
        """Return the conditions of what the folder holds; None if it holds nothing."""
        return self.read(_SETTINGS_FILE)

    def environment(self) -> dict[str, Any]:
        """Return the record of machine and invocations."""
        return self.read(_ENVIRONMENT_FILE) or {}

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep the record of machine and invocations."""
        self.write(_ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")

    def runs(self) -> list[dict[str, Any]]:
        """Return all finished runs, oldest first."""
        file = self.folder / _RUNS_FILE
        if not file.exists():
            return []
        found = {}
        for line in file.read_text().splitlines():
            try:
                run = json.loads(line)
            except json.JSONDecodeError:
                continue  # Cut short by a crash, and measured again since.
            found[key_of(run)] = run
        return list(found.values())

    def append_run(self, run: Mapping[str, Any]) -> None:
        """Add a run, for good."""
        with (self.folder / _RUNS_FILE).open("a") as file:
            # The line before may have been cut short.
            file.write(f"\n{json.dumps(run)}\n")
            file.flush()
            os.fsync(file.fileno())

    def record_file(self, key: RunKey) -> Path:
        """Return where the records of a run go, before they are compressed."""
        number, arm, workload, load = key
        name = f"{number}-{Path(workload).name}-{load}-{arm}"
        safe = re.sub(r"[^\w.=-]", "_", name)
        return self.folder / RECORD_FOLDER / f"{safe}.jsonl"

    def write(self, name: str, text: str) -> None:
        """Write a file, all or nothing."""
        path = self.folder / name
        unfinished = path.with_name(f"{name}.unfinished")
        unfinished.write_text(text)
        unfinished.replace(path)

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file; None if it is not there."""
        path = self.folder / name
        if not path.exists():
            return None
        values: dict[str, Any] = json.loads(path.read_text())
        return values


def key_of(run: Mapping[str, Any]) -> RunKey:
    """Return what a run is known by."""
    return run["round"], run["arm"], run["workload"], run["load"]
