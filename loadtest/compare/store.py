"""What has been measured so far, on disk, so that an experiment can go on in pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.result_folder import ResultFolder

LOG_FOLDER = "logs"
_RECORD_FOLDER = "records"

RunKey = tuple[int, str, str, str]
"""Round, arm, workload, load."""


class Store(ResultFolder):
    """An output folder, with a record for each run."""

    records_file = "runs.jsonl"
    output_files = (
        *("results.json", "runs.csv", "timeline.csv", "processes.csv"),
        "report.html",
    )
    folders = (_RECORD_FOLDER, LOG_FOLDER)
    error = LoadTestError

    def runs(self) -> list[dict[str, Any]]:
        """Return all finished runs, oldest first; of one run again, the last."""
        return list({key_of(run): run for run in self.records()}.values())

    def record_file(self, key: RunKey) -> Path:
        """Return where the records of a run go, before they are compressed."""
        number, arm, workload, load = key
        name = f"{number}-{Path(workload).name}-{load}-{arm}"
        folder = self.folder / _RECORD_FOLDER
        folder.mkdir(exist_ok=True)
        return folder / (re.sub(r"[^\w.=-]", "_", name) + ".jsonl")


def key_of(run: Mapping[str, Any]) -> RunKey:
    """Return what a run is known by."""
    return run["round"], run["arm"], run["workload"], run["load"]
