"""Writes results.json, tables as CSV and a report.html that needs nothing else."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loadtest.client.errors import LoadTestError
from loadtest.client.records import Records, read_records
from loadtest.result_folder import ResultFolder

from .objectives import UNCOUNTED, Objective, judge, judge_chaos, judge_soak
from .rows import COMPARED, make_ratios, make_rows, over_time
from .summary import Limits, Targets

Run = Mapping[str, Any]

_TEMPLATE = "page.html.jinja"
_MAX_LISTED = 2000
_SHOWN = {
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "TTFT p95",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p95_ms": "TPOT p95",
    "e2e_p95_ms": "E2E p95 ms",
}
_SAMPLES = {"timeline": "timeline.csv", "process_samples": "processes.csv"}


def write_results(
    folder: ResultFolder, runs: Sequence[Run], objectives: Sequence[Objective]
) -> dict[str, Any]:
    """Write results.json and the tables beside it from what has been measured.

    Returns:
        What results.json holds.

    Raises:
        LoadTestError: If nothing has been measured.
    """
    conditions = folder.conditions()
    if not runs or conditions is None:
        raise LoadTestError(f"--output {folder.folder} holds no measurements to report")
    rows, ratios = make_rows(runs), make_ratios(runs)
    verdicts = judge(objectives, rows, ratios) + judge_chaos(runs) + judge_soak(runs)
    left_out = (*_SAMPLES, "failed_requests")
    kept = [{k: run[k] for k in run if k not in left_out} for run in runs]
    results = {
        "environment": folder.environment(),
        "settings": conditions,
        "objectives": [asdict(verdict) for verdict in verdicts],
        "rows": rows,
        "ratios": ratios,
        "runs": [
            run | {"counters": {n: v for n, v in run["counters"].items() if v}}
            for run in kept
        ],
        "failed_requests": [f for run in runs for f in run["failed_requests"]],
    }
    folder.write("results.json", json.dumps(_round(results), indent=1) + "\n")
    flat = pd.json_normalize(kept).drop(columns="chaos")
    counters = [name for name in flat if name.startswith("counters.")]
    flat["invalid_because"] = flat["invalid_because"].map("; ".join)
    folder.write("runs.csv", flat.drop(columns=counters).to_csv(index=False))
    for kind, name in _SAMPLES.items():
        tables = [table for run in runs if len(table := over_time(run, kind))]
        if tables:
            folder.write(name, pd.concat(tables).to_csv(index=False))
    return results


def write_page(
    folder: ResultFolder, runs: Sequence[Run], results: Mapping[str, Any]
) -> Path:
    """Write report.html; without matplotlib it has tables alone.

    Returns:
        The file.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["spread"] = _spread
    failed, rows = results["failed_requests"], results["rows"]
    caption = _describe_origin(results)
    text = environment.get_template(_TEMPLATE).render(
        results=results,
        caption=caption,
        settings=results["settings"],
        default_limits=asdict(Limits()),
        uncounted=UNCOUNTED,
        cells=list(dict.fromkeys((row["workload"], row["load"]) for row in rows)),
        shown=_SHOWN,
        compared=COMPARED,
        figures=[
            {"title": title, "data": base64.b64encode(png).decode()}
            for title, png in _draw(folder.folder, results, runs, caption)
            if png is not None
        ],
        failed=failed[:_MAX_LISTED],
        num_failed=len(failed),
        chaos=[
            {"arm": run["arm"], "load": run["load"], "round": run["round"], **blow}
            for run in runs
            for blow in run["chaos"]
        ],
    )
    folder.write("report.html", text)
    return folder.folder / "report.html"


def _describe_origin(results: Mapping[str, Any]) -> str:
    """Return machine, models and number of requests, for under every figure."""
    environment = results["environment"]
    machine, models = environment.get("machine", {}), environment.get("models", {})
    parts = [
        f"{machine.get('cpu') or 'unknown machine'}, {machine.get('cores')} cores, "
        f"{machine.get('memory_gib')} GiB",
        *(f"{r} {m['name']} ({m['digest'][:12]})" for r, m in models.items()),
        f"{sum(row['num_sent'] for row in results['rows'])} requests in all",
    ]
    return "; ".join(parts)


def _draw(
    folder: Path, results: Mapping[str, Any], runs: Sequence[Run], caption: str
) -> Iterator[tuple[str, bytes | None]]:
    try:
        from . import figures
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        sys.stderr.write(
            "no figures: matplotlib is missing; install it with "
            "pip install --no-deps -r configs/requirements/dev.txt\n"
        )
        return
    targets = Targets(**results["settings"]["targets"])
    rows = pd.DataFrame({"row": results["rows"]})
    kind = [(row["workload"], row["load"].partition(":")[0]) for row in rows["row"]]
    for (workload, process), own in rows.groupby(pd.Index(kind), sort=False)["row"]:
        title = f"{workload}, {process}: against load"
        yield title, figures.draw_against_load(own.tolist(), targets, caption)
    by_cell: dict[tuple[str, str], dict[str, Run]] = {}
    for run in runs:
        by_cell.setdefault((run["workload"], run["load"]), {})[run["arm"]] = run
    for cell, last in by_cell.items():
        title = ", ".join(cell)
        records = {arm: _read(folder / run["records"]) for arm, run in last.items()}
        outcomes = {arm: one.outcomes for arm, one in records.items()}
        drawn = figures.draw_distributions(outcomes, caption)
        yield f"{title}: distributions, all of the last round", drawn
        sending_s = max(run["sending_s"] for run in last.values())
        drawn = figures.draw_timeline(records, last, sending_s, caption)
        yield f"{title}: over time, last round", drawn
        for arm, run in last.items():
            if run.get("is_soak"):
                drawn = figures.draw_soak(run["process_samples"], caption)
                yield f"{title}, {arm}: processes", drawn


def _read(path: Path) -> Records:
    return read_records(path) if path.exists() else Records()


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _spread(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    middle, low, high = (_number(value[name]) for name in ("median", "min", "max"))
    if value["min"] == value["max"]:
        return middle
    return Markup("{}<br><small>{}-{}</small>").format(middle, low, high)


def _round(value: Any) -> Any:
    """Round numbers to what a reader can use; NaN is no JSON."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # Six digits, but for times of day.
        return float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 3)
    if isinstance(value, Mapping):
        return {key: _round(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_round(one) for one in value]
    return value
