"""Writes results.json, tables as CSV and a report.html that needs nothing else."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .errors import LoadTestError
from .growth import Growth, find_leftovers, fit_all
from .objectives import UNCOUNTED, Objective, Verdict, judge
from .objectives import where as place_of
from .records import Records, read_records
from .results import (
    COMPARED,
    cell_of,
    make_ratios,
    make_rows,
    over_time,
    to_csv,
)
from .store import Store
from .summary import Limits, Targets

_TEMPLATE = "report.html.jinja"
_MAX_LISTED = 2000
_SHOWN = (
    *("output_tokens_per_s", "requests_per_s", "goodput_per_s"),
    *("ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms"),
    *("tpot_p50_ms", "tpot_p95_ms", "e2e_p95_ms"),
)


def write_results(store: Store, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Write results.json and the tables beside it from what has been measured.

    Returns:
        What results.json holds.

    Raises:
        LoadTestError: If nothing has been measured.
    """
    runs, conditions = store.runs(), store.conditions()
    if not runs or conditions is None:
        raise LoadTestError(f"--output {store.folder} holds no measurements to report")
    rows, ratios = make_rows(runs), make_ratios(runs)
    verdicts = judge(objectives, rows, ratios) + judge_chaos(runs) + judge_soak(runs)
    results = {
        "environment": store.environment(),
        "settings": conditions,
        "objectives": [asdict(verdict) for verdict in verdicts],
        "rows": rows,
        "ratios": ratios,
        "runs": [_without_samples(run) for run in runs],
        "failed_requests": [f for run in runs for f in run["failed_requests"]],
    }
    store.write("results.json", json.dumps(_round(results), indent=1) + "\n")
    store.write("runs.csv", to_csv([_flat_figures(run) for run in runs]))
    for name, kind in (("timeline", "timeline"), ("processes", "process_samples")):
        points = [point for run in runs for point in over_time(run, kind)]
        if points:
            store.write(f"{name}.csv", to_csv(_round(points)))
    return results


def judge_chaos(runs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return a verdict for everything that was to befall servers and streams."""
    return [
        Verdict(
            f"chaos: {blow['kind']} is done",
            place_of(run),
            blow.get("num_streams"),
            blow["done"],
            blow["what"],
        )
        for run in runs
        for blow in run["chaos"]
    ]


def judge_soak(runs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return a verdict for each measure of each process of soak runs, and leaks."""
    verdicts = []
    for run in runs:
        if not run.get("is_soak"):
            continue
        place = place_of(run)
        fits = fit_all(run["process_samples"])
        if not fits:
            verdicts.append(
                Verdict("soak", place, None, False, "no processes were sampled")
            )
        verdicts += [
            _judge_growth(f"{role}: {measure} does not grow", place, fit)
            for (role, measure), fit in fits.items()
        ]
        leftovers = find_leftovers(run["timeline"])
        verdicts.append(
            Verdict("nothing is left", place, None, not leftovers, "; ".join(leftovers))
        )
    return verdicts


def _judge_growth(text: str, place: str, fit: Growth | None) -> Verdict:
    if fit is None:
        note = "too few samples of the same processes; soak longer"
        return Verdict(text, place, None, False, note)
    note = (
        f"{fit.per_hour:+.1f} an hour ({fit.per_hour_low:+.1f} to "
        f"{fit.per_hour_high:+.1f}; {fit.tolerated_per_hour:.1f} are tolerated) "
        f"over {60 * fit.hours:.0f} min, mean {fit.mean:.0f}"
    )
    if not (fit.is_certain or fit.is_excluded):
        note = f"cannot tell, soak longer: {note}"
    return Verdict(text, place, fit.per_hour, fit.is_excluded, note)


def write_report(store: Store, results: Mapping[str, Any]) -> Path:
    """Write report.html; without matplotlib it has tables alone.

    Returns:
        The file.
    """
    runs = store.runs()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["spread"] = _spread
    failed = results["failed_requests"]
    text = environment.get_template(_TEMPLATE).render(
        results=results,
        machine=results["environment"].get("machine", {}),
        versions=results["environment"].get("versions", {}),
        settings=results["settings"],
        default_limits=asdict(Limits()),
        uncounted=UNCOUNTED,
        cells=list(dict.fromkeys(cell_of(row) for row in results["rows"])),
        spreads=_SHOWN,
        compared=COMPARED,
        figures=_draw(store, results, runs),
        failed=failed[:_MAX_LISTED],
        num_failed=len(failed),
        chaos=[
            {"arm": run["arm"], "load": run["load"], "round": run["round"], **blow}
            for run in runs
            for blow in run["chaos"]
        ],
    )
    store.write("report.html", text)
    return store.folder / "report.html"


def _draw(
    store: Store, results: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    try:
        from . import figures
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        sys.stderr.write(
            "no figures: matplotlib is missing; install it with "
            "pip install --no-deps -r configs/requirements/dev.txt\n"
        )
        return []
    targets = Targets(**results["settings"]["targets"])
    drawn: list[tuple[str, bytes | None]] = []
    by_kind: dict[tuple[str, str], list[Any]] = {}
    for row in results["rows"]:
        process = row["load"].partition(":")[0]
        by_kind.setdefault((row["workload"], process), []).append(row)
    for (workload, process), rows in by_kind.items():
        title = f"{workload}, {process}: against load"
        drawn.append((title, figures.draw_against_load(rows, targets)))
    for cell in dict.fromkeys(map(cell_of, runs)):
        own = [run for run in runs if cell_of(run) == cell]
        title = f"{cell[0]}, {cell[1]}"
        last = {run["arm"]: run for run in own}
        records = {arm: _read(store, run) for arm, run in last.items()}
        outcomes = {arm: one.outcomes for arm, one in records.items()}
        shown = figures.draw_distributions(outcomes)
        drawn.append((f"{title}: distributions, all of the last round", shown))
        timeline = figures.draw_timeline(
            records,
            {arm: run["timeline"] for arm, run in last.items()},
            {arm: run["chaos"] for arm, run in last.items()},
            max(run["sending_s"] for run in own),
        )
        drawn.append((f"{title}: over time, last round", timeline))
        for arm, run in last.items():
            if run.get("is_soak"):
                soak = figures.draw_soak(run["process_samples"])
                drawn.append((f"{title}, {arm}: processes", soak))
    return [
        {"title": title, "data": base64.b64encode(png).decode()}
        for title, png in drawn
        if png is not None
    ]


def _read(store: Store, run: Mapping[str, Any]) -> Records:
    path = store.folder / run["records"]
    return read_records(path) if path.exists() else Records()


def _without_samples(run: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("timeline", "process_samples", "failed_requests")
    kept = {name: value for name, value in run.items() if name not in left_out}
    return kept | {"counters": {n: v for n, v in run["counters"].items() if v}}


def _flat_figures(run: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("chaos", "counters")
    return {k: v for k, v in _without_samples(run).items() if k not in left_out}


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def _spread(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    middle = _number(value["median"])
    if value["min"] == value["max"]:
        return middle
    low, high = _number(value["min"]), _number(value["max"])
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
