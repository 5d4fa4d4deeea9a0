"""What has been measured so far, on disk, so that a run can go on in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.result_folder import ResultFolder

from .arms import Arm
from .errors import BenchError
from .plan import Cell

TRACE_FOLDER = "traces"
TRACED_FILE = "traced.json"
LOG_FOLDER = "logs"


class Store(ResultFolder):
    """An output folder, with a record for each group.

    A group is one cell in one round, measured on all arms. It is kept as a whole: one
    that was interrupted is measured again, because arms are only comparable when they
    were measured side by side.
    """

    records_file = "measurements.jsonl"
    output_files = (
        TRACED_FILE,
        "results.json",
        "results.md",
        "throughput.png",
        "calibration.png",
        "decisions.png",
        "step_time.png",
    )
    folders = (TRACE_FOLDER, LOG_FOLDER)
    error = BenchError

    def measurements(self) -> list[dict[str, Any]]:
        """Return the measurements of all groups, oldest first."""
        groups = {
            (group[0]["round"], cell_of(group[0])): group for group in self.records()
        }
        return [measurement for group in groups.values() for measurement in group]

    def done(self) -> set[tuple[int, Cell]]:
        """Return the round and cell of all groups."""
        return {(one["round"], cell_of(one)) for one in self.measurements()}

    def append_group(self, measurements: Sequence[Mapping[str, Any]]) -> None:
        """Add one group, for good: a line, which is there as a whole or not at all."""
        self.append_record(measurements)

    def traced(self) -> dict[str, Any]:
        """Return what was made of traces, by name of the cell.

        Traces are large and may be left behind when a folder moves; this is not.
        """
        return self._read_json(TRACED_FILE) or {}

    def keep_traced(self, traced: Mapping[str, Any]) -> None:
        """Keep what was made of traces."""
        self.write(TRACED_FILE, json.dumps(traced, indent=1) + "\n")

    def is_traced(self, cell: Cell, arm: Arm) -> bool:
        """Tell whether an arm was traced in a cell, here or before the folder moved."""
        if self.trace_file(cell, arm.file_name).exists():
            return True
        is_gone = not self._trace_folder(cell).exists()
        kept = self.traced().get(cell.name, {})
        return is_gone and arm.name in kept.get("policies", ())

    def trace_file(self, cell: Cell, arm_file_name: str) -> Path:
        """Return where the trace of an arm in a cell is kept."""
        return self._trace_folder(cell) / f"{arm_file_name}.npz"

    def _trace_folder(self, cell: Cell) -> Path:
        return self.folder / TRACE_FOLDER / cell.name


def cell_of(measurement: Mapping[str, Any]) -> Cell:
    """Return the cell that a measurement or a row belongs to."""
    return Cell(
        measurement["workload"], measurement["temperature"], measurement["concurrency"]
    )
