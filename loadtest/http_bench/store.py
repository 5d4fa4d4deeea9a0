"""What has been measured so far, on disk, so that an experiment can go on in pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.result_folder import ResultFolder

from .errors import LoadTestError

RECORD_FOLDER = "records"
LOG_FOLDER = "logs"

RunKey = tuple[int, str, str, str]
"""Round, arm, workload, load."""


class Store(ResultFolder):
    """An output folder, with a record for each run."""

    records_file = "runs.jsonl"
    output_files = (
        *("results.json", "runs.csv", "timeline.csv", "processes.csv"),
        "report.html",
    )
    folders = (RECORD_FOLDER, LOG_FOLDER)
    error = LoadTestError

    def __init__(self, folder: Path) -> None:
        """Open a folder; created if missing."""
        super().__init__(folder)
        (folder / RECORD_FOLDER).mkdir(exist_ok=True)

    def clear(self) -> None:
        """Remove everything that an experiment writes, and nothing else."""
        super().clear()
        (self.folder / RECORD_FOLDER).mkdir()

    def runs(self) -> list[dict[str, Any]]:
        """Return all finished runs, oldest first; of one run again, the last."""
        return list({key_of(run): run for run in self.records()}.values())

    def append_run(self, run: Mapping[str, Any]) -> None:
        """Add a run, for good."""
        self.append_record(run)

    def record_file(self, key: RunKey) -> Path:
        """Return where the records of a run go, before they are compressed."""
        number, arm, workload, load = key
        name = f"{number}-{Path(workload).name}-{load}-{arm}"
        safe = re.sub(r"[^\w.=-]", "_", name)
        return self.folder / RECORD_FOLDER / f"{safe}.jsonl"


def key_of(run: Mapping[str, Any]) -> RunKey:
    """Return what a run is known by."""
    return run["round"], run["arm"], run["workload"], run["load"]
