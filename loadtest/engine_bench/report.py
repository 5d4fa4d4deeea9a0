"""Writes results.json, results.md and the plots from what a folder holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arms import Arm, parse_arm
from .bounds import find_bounds
from .errors import BenchError
from .plan import Cell
from .rows import make_ratios, make_rows
from .store import TRACE_FOLDER, Store, cell_of
from .tables import render
from .traces import load_traces
from .workloads import is_drifting

RESULTS_FILE = "results.json"
TABLE_FILE = "results.md"


def write_results(store: Store, *, with_bounds: bool = False) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured.

    Args:
        store: Where it is.
        with_bounds: Whether to replay the traces too, which takes seconds a cell.

    Returns:
        What results.json holds.

    Raises:
        BenchError: If nothing has been measured.
    """
    measurements = store.measurements()
    conditions, environment = store.conditions(), store.environment()
    if not measurements or conditions is None:
        raise BenchError(f"--output {store.folder} holds no measurements to report")
    arms = [parse_arm(name) for name in conditions["policies"]]
    cells = list(dict.fromkeys(cell_of(one) for one in measurements))
    results = {
        "environment": environment,
        "settings": conditions,
        "rows": make_rows(measurements, cells, arms),
        "ratios": make_ratios(measurements, cells, arms),
        "bounds": _find_bounds(store, cells, arms) if with_bounds else [],
    }
    store.write(RESULTS_FILE, json.dumps(_round(results), indent=1) + "\n")
    store.write(TABLE_FILE, render(results))
    return results


def draw_plots(store: Store, results: Mapping[str, Any]) -> None:
    """Draw the plots of results and traces, or say why not."""
    try:
        import matplotlib  # noqa: F401 - only to see whether it is there
    except ModuleNotFoundError:
        sys.stderr.write(
            "no plots: matplotlib is missing; install it with "
            "pip install --no-deps -r configs/requirements/dev.txt\n"
        )
        return
    from .plots import draw_all

    arms = [parse_arm(name) for name in results["settings"]["policies"]]
    cells = list(dict.fromkeys(cell_of(row) for row in results["rows"]))
    traces = load_traces(store.folder / TRACE_FOLDER, cells, arms)
    draw_all(store.folder, results["rows"], traces)


def _find_bounds(
    store: Store, cells: Sequence[Cell], arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Return the bounds of all cells with traces and constant conditions."""
    steady = [cell for cell in cells if not is_drifting(cell.workload)]
    traces = load_traces(store.folder / TRACE_FOLDER, steady, arms)
    found = []
    for number, (cell, own) in enumerate(traces.items(), start=1):
        sys.stderr.write(f"\rbounds {number}/{len(traces)} {cell.name}\033[K")
        bounds = find_bounds(own)
        if bounds is not None:
            found.append(cell.as_dict() | bounds)
    if traces:
        sys.stderr.write("\n")
    return found


def _round(value: Any) -> Any:
    """Round numbers to what a reader can use."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _round(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_round(one) for one in value]
    return value
