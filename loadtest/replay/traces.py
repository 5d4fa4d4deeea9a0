"""Reads traces back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.arms import Arm
from loadtest.engine.plan import Cell

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The arrays of one arm in one cell; see `loadtest.engine.watch.Watch.save`."""

    arrays: dict[str, NDArray[np.generic]]

    def step(self, name: str) -> Array:
        """Return a step array, `[num_steps]`."""
        return self.arrays[f"step_{name}"].astype(np.float64)

    def draft(self, name: str) -> Array:
        """Return a draft array, `[num_drafts]` or `[num_drafts, max_depth]`."""
        return self.arrays[f"draft_{name}"].astype(np.float64)

    def window(self) -> slice:
        """Return the steps of the steady part; all where it was not marked."""
        marks = self.arrays.get("window")
        if marks is None:
            return slice(0, self.step("num_reqs").size)
        start, end = marks.astype(np.int64).tolist()
        return slice(start, end)

    def is_steady(self) -> NDArray[np.bool_]:
        """Tell which steps belong to the steady part, `[num_steps]`."""
        steady = np.zeros(self.step("num_reqs").size, dtype=np.bool_)
        steady[self.window()] = True
        return steady

    def state(self) -> dict[str, Any]:
        """Return what the planner knew at the start; {} if it learns nothing."""
        state = self.arrays.get("state")
        found: dict[str, Any] = {} if state is None else json.loads(str(state))
        return found


Traces = Mapping[Cell, Mapping[Arm, RecordedTrace]]


def load_trace(path: Path) -> RecordedTrace:
    """Load a trace."""
    with np.load(path) as arrays:
        return RecordedTrace({name: arrays[name] for name in arrays.files})


def load_traces(folder: Path, cells: Sequence[Cell], arms: Sequence[Arm]) -> Traces:
    """Load all traces below a folder that exist."""
    traces: dict[Cell, dict[Arm, RecordedTrace]] = {}
    for cell in cells:
        for arm in arms:
            path = folder / cell.name / f"{arm.file_name}.npz"
            if path.exists():
                traces.setdefault(cell, {})[arm] = load_trace(path)
    return traces
