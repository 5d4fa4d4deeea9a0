"""Writes results.json, results.md and the plots from what a folder holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .arms import Arm, lend_drafts, parse_bench_arm
from .bounds import find_bounds
from .errors import BenchError
from .outcome_bins import bin_outcomes
from .plan import Cell
from .rows import make_ratios, make_rows
from .saturation import find_saturated
from .store import TRACE_FOLDER, Store, cell_of
from .tables import render
from .traces import RecordedTrace, load_traces
from .verdicts import judge_all
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
    arms = [parse_bench_arm(name) for name in conditions["policies"]]
    cells = list(dict.fromkeys(cell_of(one) for one in measurements))
    rows = make_rows(measurements, cells, arms)
    if with_bounds:
        _read_traces(store, cells, arms)
    traced = [store.traced().get(cell.name, {}) for cell in cells]
    bounds = [one["bounds"] for one in traced if one.get("bounds")]
    calibration = [line for one in traced for line in one.get("calibration", ())]
    saturated = find_saturated(rows)
    for one in (*rows, *bounds):
        one["is_saturated"] = cell_of(one) in saturated
    results = {
        "environment": environment,
        "settings": conditions,
        "verdicts": judge_all(measurements, rows, bounds, calibration, cells, arms),
        "rows": rows,
        "ratios": make_ratios(measurements, cells, arms),
        "bounds": bounds,
        "calibration": calibration,
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

    arms = [parse_bench_arm(name) for name in results["settings"]["policies"]]
    cells = list(dict.fromkeys(cell_of(row) for row in results["rows"]))
    traces = load_traces(store.folder / TRACE_FOLDER, cells, arms)
    draw_all(store.folder, results["rows"], traces)


def _read_traces(store: Store, cells: Sequence[Cell], arms: Sequence[Arm]) -> None:
    """Compute bounds and calibration of all cells whose traces are here, and keep them.

    What was computed from more traces than are here stays.
    """
    kept = store.traced()
    known = [*arms, *lend_drafts(arms)]
    traces = load_traces(store.folder / TRACE_FOLDER, cells, known)
    for number, (cell, own) in enumerate(traces.items(), start=1):
        sys.stderr.write(f"\rtraces {number}/{len(traces)} {cell.name}\033[K")
        names = [arm.name for arm in own]
        if not set(kept.get(cell.name, {}).get("policies", ())) <= set(names):
            continue
        # Prices change in a drifting cell: one set of them fits neither half.
        bounds = None if is_drifting(cell.workload) else find_bounds(own, arms)
        kept[cell.name] = {
            "policies": names,
            "bounds": None if bounds is None else cell.as_dict() | bounds,
            "calibration": _find_calibration(cell, own),
        }
    if not traces:
        return
    sys.stderr.write("\n")
    store.keep_traced(_round(kept))
    without = [
        cell.name
        for cell in traces
        if not is_drifting(cell.workload) and not kept[cell.name]["bounds"]
    ]
    if without:
        sys.stderr.write(
            f"no bounds for {', '.join(without)}: they need the trace of a fixed "
            "policy as deep as goodput\n"
        )


def _find_calibration(
    cell: Cell, traces: Mapping[Arm, RecordedTrace]
) -> list[dict[str, Any]]:
    """Return the calibration error of every policy that predicts acceptance."""
    found = []
    for arm, trace in traces.items():
        curve = bin_outcomes(*trace.outcomes("predicted"))
        raw = bin_outcomes(*trace.outcomes("confidence"))
        if curve is not None:
            found.append(
                {"policy": arm.name}
                | cell.as_dict()
                | {
                    "num_outcomes": int(curve.count.sum()),
                    "error": curve.error,
                    "exact_error": curve.exact_error,
                    "confidence_error": None if raw is None else raw.error,
                }
            )
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
