"""Writes results.json and a report.html that needs nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from loadtest.client.records import Records, read_records
from loadtest.page import embed, make_environment
from loadtest.result_folder import ResultFolder

from . import figures
from .objectives import UNCOUNTED, Objective, judge, judge_soak
from .rows import COMPARED, make_ratios, make_rows
from .summary import Limits, Targets

Run = Mapping[str, Any]

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
_ONLY_IN_RECORDS = ("timeline", "process_samples", "failed_requests")


def write_results(
    folder: ResultFolder, runs: Sequence[Run], objectives: Sequence[Objective]
) -> dict[str, Any]:
    """Write results.json from what has been measured, and return what it holds."""
    rows, ratios = make_rows(runs), make_ratios(runs)
    verdicts = judge(objectives, rows, ratios) + judge_soak(runs)
    results = {
        "objectives": [asdict(verdict) for verdict in verdicts],
        "rows": rows,
        "ratios": ratios,
        "runs": [
            {k: v for k, v in run.items() if k not in _ONLY_IN_RECORDS} for run in runs
        ],
        "failed_requests": [f for run in runs for f in run["failed_requests"]],
    }
    return folder.write_results(results)


def write_page(
    folder: ResultFolder, runs: Sequence[Run], results: Mapping[str, Any]
) -> Path:
    """Write report.html with figures, and return the file."""
    environment = make_environment(Path(__file__).parent)
    environment.filters |= {"number": _number, "spread": _spread}
    failed, rows = results["failed_requests"], results["rows"]
    page = environment.get_template("page.html.jinja").render(
        results=results,
        caption=_describe_origin(results),
        settings=results["settings"],
        default_limits=asdict(Limits()),
        uncounted=UNCOUNTED,
        cells=list(dict.fromkeys((row["workload"], row["load"]) for row in rows)),
        shown=_SHOWN,
        compared=COMPARED,
        figures=embed(_draw(folder.folder, results, runs)),
        failed=failed[:_MAX_LISTED],
        num_failed=len(failed),
    )
    folder.write("report.html", page)
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
    folder: Path, results: Mapping[str, Any], runs: Sequence[Run]
) -> Iterator[tuple[str, bytes | None]]:
    caption, targets = _describe_origin(results), results["settings"]["targets"]

    def process_of(row: Run) -> str:
        return f"{row['workload']}, {row['load'].partition(':')[0]}"

    for title, rows in groupby(sorted(results["rows"], key=process_of), process_of):
        drawn = figures.draw_against_load([*rows], Targets(**targets), caption)
        yield f"{title}: against load", drawn
    by_cell: dict[str, dict[str, Run]] = {}
    for run in runs:
        by_cell.setdefault(f"{run['workload']}, {run['load']}", {})[run["arm"]] = run
    for title, last in by_cell.items():
        records = {arm: _read(folder / run["records"]) for arm, run in last.items()}
        sending_s = max(run["sending_s"] for run in last.values())
        drawn = figures.draw_timeline(records, last, sending_s, caption)
        yield f"{title}: over time, last round", drawn
        for arm, run in last.items():
            drawn = figures.draw_soak(run["process_samples"], caption)
            yield f"{title}, {arm}: processes", drawn


def _read(path: Path) -> Records:
    return read_records(path) if path.exists() else Records()


def _number(value: Any, digits: int = 3) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _spread(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "-"
    middle, low, high = (_number(value[name]) for name in ("median", "min", "max"))
    if value["min"] == value["max"]:
        return middle
    return Markup("{}<br><small>{}-{}</small>").format(middle, low, high)
