"""What has been measured so far, on disk, so that a run can go on in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.client.errors import LoadTestError
from loadtest.result_folder import ResultFolder

from .plan import Cell

LOG_FOLDER = "logs"
_TRACE_FOLDER = "traces"


class Store(ResultFolder):
    """An output folder, with a record for each group.

    A group is one cell in one round, measured on all arms. It is kept as a whole: one
    that was interrupted is measured again, because arms are only comparable when they
    were measured side by side.
    """

    records_file = "measurements.jsonl"
    output_files = ("results.json", "results.md", "results.png")
    folders = (_TRACE_FOLDER, LOG_FOLDER)
    error = LoadTestError

    def measurements(self) -> list[dict[str, Any]]:
        """Return the measurements of all groups, oldest first."""
        return [measurement for group in self.records() for measurement in group]

    def done(self) -> set[tuple[int, Cell]]:
        """Return the round and cell of all groups."""
        return {(one["round"], cell_of(one)) for one in self.measurements()}

    def trace_file(self, cell: Cell, arm: Arm) -> Path:
        """Return where the steps of an arm in a cell are kept."""
        return self.folder / _TRACE_FOLDER / cell.name / f"{arm.file_name}.npz"


def cell_of(measurement: Mapping[str, Any]) -> Cell:
    """Return the cell that a measurement belongs to."""
    return Cell(
        measurement["workload"], measurement["temperature"], measurement["concurrency"]
    )
