"""What has been measured so far, on disk, so that a run can go on in pieces."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError
from .plan import Cell

SETTINGS_FILE = "settings.json"
ENVIRONMENT_FILE = "environment.json"
MEASUREMENTS_FILE = "measurements.jsonl"
TRACE_FOLDER = "traces"
LOG_FOLDER = "logs"
_OWN_FILES = (
    SETTINGS_FILE,
    ENVIRONMENT_FILE,
    MEASUREMENTS_FILE,
    "results.json",
    "results.md",
    "throughput.png",
    "calibration.png",
    "decisions.png",
    "step_time.png",
)


class Store:
    """An output folder.

    A group is one cell in one round, measured on all arms. It is kept as a whole: one
    that was interrupted is measured again, because arms are only comparable when they
    were measured side by side.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder; created if missing."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove everything that a run writes, and nothing else."""
        for name in _OWN_FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in (TRACE_FOLDER, LOG_FOLDER):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def check_conditions(self, conditions: Mapping[str, Any]) -> None:
        """Note the conditions of a new run, or compare those of one to be resumed.

        Raises:
            BenchError: If what is in the folder was measured under others.
        """
        now = json.loads(json.dumps(conditions))
        before = self.conditions()
        if before is None or not self.measurements():
            self.write(SETTINGS_FILE, json.dumps(now, indent=1) + "\n")
            return
        changed = [
            f"  {key}: was {before.get(key)!r}, is {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise BenchError(
                f"--output {self.folder} holds results measured under other "
                "conditions:\n" + "\n".join(changed) + "\n"
                "Put them back, choose another --output, or discard what is there "
                "with --restart"
            )

    def conditions(self) -> dict[str, Any] | None:
        """Return the conditions of what the folder holds; None if it holds nothing."""
        return self._read_json(SETTINGS_FILE)

    def environment(self) -> dict[str, Any] | None:
        """Return the record of machine, models and invocations; None without one."""
        return self._read_json(ENVIRONMENT_FILE)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep the record of machine, models and invocations."""
        self.write(ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")

    def measurements(self) -> list[dict[str, Any]]:
        """Return the measurements of all groups, oldest first."""
        file = self.folder / MEASUREMENTS_FILE
        if not file.exists():
            return []
        groups = {}
        for line in file.read_text().splitlines():
            try:
                group = json.loads(line)
            except json.JSONDecodeError:
                continue  # Cut short by a crash, and measured again since.
            groups[group[0]["round"], cell_of(group[0])] = group
        return [measurement for group in groups.values() for measurement in group]

    def done(self) -> set[tuple[int, Cell]]:
        """Return the round and cell of all groups."""
        return {(one["round"], cell_of(one)) for one in self.measurements()}

    def append_group(self, measurements: Sequence[Mapping[str, Any]]) -> None:
        """Add one group, for good: a line, which is there as a whole or not at all."""
        with (self.folder / MEASUREMENTS_FILE).open("a") as file:
            # The line before may have been cut short.
            file.write(f"\n{json.dumps(measurements)}\n")
            file.flush()
            os.fsync(file.fileno())

    def trace_file(self, cell: Cell, arm_file_name: str) -> Path:
        """Return where the trace of an arm in a cell is kept."""
        return self.folder / TRACE_FOLDER / cell.name / f"{arm_file_name}.npz"

    def write(self, name: str, text: str) -> None:
        """Write a file, all or nothing."""
        path = self.folder / name
        unfinished = path.with_name(f"{name}.unfinished")
        unfinished.write_text(text)
        unfinished.replace(path)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.exists():
            return None
        values: dict[str, Any] = json.loads(path.read_text())
        return values


def cell_of(measurement: Mapping[str, Any]) -> Cell:
    """Return the cell that a measurement or a row belongs to."""
    return Cell(
        measurement["workload"], measurement["temperature"], measurement["concurrency"]
    )
