"""Writes results.json, results.md and the plots from what a folder holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from .arms import parse_arm
from .errors import BenchError
from .rows import make_ratios, make_rows
from .store import TRACE_FOLDER, Store, cell_of
from .tables import render

RESULTS_FILE = "results.json"
TABLE_FILE = "results.md"


def write_results(store: Store) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured.

    Returns:
        What results.json holds.

    Raises:
        BenchError: If nothing has been measured.
    """
    measurements = store.measurements()
    conditions, environment = store.conditions(), store.environment()
    if not measurements or conditions is None or environment is None:
        raise BenchError(f"--output {store.folder} holds no measurements to report")
    arms = [parse_arm(name) for name in conditions["policies"]]
    cells = list(dict.fromkeys(cell_of(one) for one in measurements))
    results = {
        "environment": environment,
        "settings": conditions,
        "rows": make_rows(measurements, cells, arms),
        "ratios": make_ratios(measurements, cells, arms),
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
    from .plots import draw_all, load_traces

    arms = [parse_arm(name) for name in results["settings"]["policies"]]
    cells = list(dict.fromkeys(cell_of(row) for row in results["rows"]))
    traces = load_traces(store.folder / TRACE_FOLDER, cells, arms)
    draw_all(store.folder, results["rows"], traces)


def _round(value: Any) -> Any:
    """Round numbers to what a reader can use."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _round(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_round(one) for one in value]
    return value
