"""A folder of results that grow in pieces: what all benchmarks keep on disk."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import LoadTestError

_SETTINGS_FILE = "settings.json"
_ENVIRONMENT_FILE = "environment.json"
_OUTPUT = ("results.json", "results.md", "results.png", "runs.csv", "report.html")
_FOLDERS = ("traces", "records", "logs")
"""What benchmarks make of their records, and keep beside them, each some of it."""

_LOG_TAIL_LINES = 15


class ResultFolder:
    """An output folder. A record is kept whole or not at all.

    Attributes:
        records_file: Holds one JSON value a line.
    """

    records_file = "measurements.jsonl"

    def __init__(self, folder: Path, *, restart: bool = False) -> None:
        """Open a folder; created if missing.

        With `restart` what it holds goes, once `check_conditions` is told what comes.
        """
        self.folder, self._restart = folder, restart
        folder.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove everything that an experiment writes, and nothing else."""
        for name in (_SETTINGS_FILE, _ENVIRONMENT_FILE, self.records_file, *_OUTPUT):
            (self.folder / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def check_conditions(self, conditions: Mapping[str, Any]) -> None:
        """Note the conditions of a new experiment, or compare those of one resumed.

        Raises:
            LoadTestError: What is in the folder was measured under others.
        """
        if self._restart:
            self.clear()
        now = json.loads(json.dumps(conditions))
        before = self.conditions()
        if before is None or not self.records():
            self.write_json(_SETTINGS_FILE, now)
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
        return self.read_json(_SETTINGS_FILE)

    def environment(self) -> dict[str, Any]:
        """Return the record of machine, models and invocations; {} without one."""
        return self.read_json(_ENVIRONMENT_FILE) or {}

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep the record of machine, models and invocations."""
        self.write_json(_ENVIRONMENT_FILE, environment)

    def records(self) -> list[Any]:
        """Return all records, oldest first."""
        file = self.folder / self.records_file
        found = []
        for line in file.read_text().splitlines() if file.exists() else ():
            # One that a crash has cut short has been measured again since.
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def measurements(self) -> list[dict[str, Any]]:
        """Return all that was measured, oldest first; a record may be a group of it."""
        groups = (one if isinstance(one, list) else [one] for one in self.records())
        return [one for group in groups for one in group]

    def append_record(self, record: Any) -> None:
        """Add a record, for good."""
        with (self.folder / self.records_file).open("a") as file:
            # The line before may have been cut short.
            file.write(f"\n{json.dumps(record)}\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, text: str) -> None:
        """Write a file, all or nothing."""
        path = self.folder / name
        unfinished = path.with_name(f"{name}.unfinished")
        unfinished.write_text(text)
        unfinished.replace(path)

    def write_results(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write results.json with as many digits as a reader can use.

        Returns what it holds, environment and settings too; None where there was no
        number.
        """
        place = {"environment": self.environment(), "settings": self.conditions()}
        text = json.dumps(place | results, default=lambda number: number.item())
        shown: dict[str, Any] = json.loads(
            text, parse_float=_shorten, parse_constant=lambda _: None
        )
        self.write_json("results.json", shown)
        return shown

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file of JSON, all or nothing."""
        self.write(name, json.dumps(value, indent=1) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return what a file of JSON holds; None if there is none."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None


def _shorten(digits: str) -> float:
    """Return six digits, but for times of day."""
    number = float(digits)
    return float(f"{number:.6g}") if abs(number) < 1e6 else round(number, 3)


def read_tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])
