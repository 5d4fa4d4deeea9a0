"""What has been measured so far: one line per measurement, written at once."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEASUREMENTS, REPORT, LOGS = "measurements.jsonl", "report.md", "logs"

Key = tuple[str, str, str]
"""Pair, arm, and the cell's name or `law`."""


class Results:
    """An output folder that only grows; the last measurement of a kind counts."""

    def __init__(self, folder: Path) -> None:
        """Open a folder; created if missing."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[Key, dict[str, Any]]:
        """Return all measurements, later ones in the place of earlier ones."""
        file = self.folder / MEASUREMENTS
        found: dict[Key, dict[str, Any]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                one = json.loads(line)
            except json.JSONDecodeError:
                continue  # Cut short when a part was killed; it is measured again.
            found[one["pair"], one["arm"], one["cell"]] = one
        return found

    def append(self, pair: str, arm: str, cell: str, result: Mapping[str, Any]) -> None:
        """Add one measurement, for good."""
        line = json.dumps({"pair": pair, "arm": arm, "cell": cell, **result})
        with (self.folder / MEASUREMENTS).open("a") as file:
            # The line before may have been cut short.
            file.write(f"\n{line}\n")
            file.flush()
            os.fsync(file.fileno())


def copy_results(folder: Path, destination: Path) -> None:
    """Copy measurements, report and packed logs; a file at a time, each complete."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in (MEASUREMENTS, REPORT):
        if (folder / name).exists():
            shutil.copyfile(folder / name, destination / f"{name}.new")
            (destination / f"{name}.new").rename(destination / name)
    if (folder / LOGS).is_dir():
        unfinished = destination / "logs.tar.gz.new"
        with tarfile.open(unfinished, "w:gz") as archive:
            archive.add(folder / LOGS, arcname=LOGS)
        unfinished.rename(destination / "logs.tar.gz")
