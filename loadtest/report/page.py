"""Writes results.json and a report.html that needs nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from loadtest.client.records import Records, read_records
from loadtest.page import describe_source, embed, make_environment
from loadtest.result_folder import ResultFolder

from . import figures
from .objectives import Objective, judge, judge_soak, pair_arms
from .rows import COMPARED, CPU_METRICS, make_ratios, make_rows
from .summary import Limits, Targets

Run = Mapping[str, Any]

_MAX_LISTED = 2000
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
    environment, rows = make_environment(Path(__file__).parent), results["rows"]
    environment.filters["show"] = _show
    ratios = results["ratios"]
    made = {f"{one['arm']}/{one['against']}" for one in ratios}
    pairs = [one for one in pair_arms(rows, ratios) if one["arm"] in made]
    page = environment.get_template("page.html.jinja").render(
        results=results,
        caption=_describe_origin(results),
        settings=results["settings"],
        default_limits=asdict(Limits()),
        cells=[
            (cell, _of(cell, rows), _of(cell, pairs), _tell_cpu(_of(cell, rows)))
            for cell in dict.fromkeys(map(_cell, rows))
        ],
        compared=[*COMPARED],
        figures=embed(_draw(folder.folder, results, runs)),
        failed=results["failed_requests"],
        max_listed=_MAX_LISTED,
    )
    folder.write("report.html", page)
    return folder.folder / "report.html"


def _cell(row: Run) -> str:
    return f"{row['workload']}, {row['load']}"


def _of(cell: str, rows: Sequence[Run]) -> list[Run]:
    return [row for row in rows if _cell(row) == cell]


def _tell_cpu(rows: Sequence[Run]) -> list[dict[str, Any]]:
    """Return each arm's CPU time, in all and by role; nothing if none was measured."""
    roles = sorted({role for row in rows for role in row["cpu_ms_per_token_by_role"]})
    return [
        {name: row[name] for name in ("arm", *CPU_METRICS)}
        | {role: row["cpu_ms_per_token_by_role"].get(role) for role in roles}
        for row in rows
        if roles
    ]


def _describe_origin(results: Mapping[str, Any]) -> str:
    """Return machine, models and number of requests, for under every figure."""
    environment, rows = results["environment"], results["rows"]
    source, cores = describe_source(environment), environment["machine"]["cores"]
    num_sent = sum(row["num_sent"] for row in rows)
    return f"{source}; {cores} cores; {num_sent} requests in all"


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
        by_cell.setdefault(_cell(run), {})[run["arm"]] = run
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


def _show(value: Any) -> str:
    """Return a cell's text; of several rounds the median and the range."""
    if isinstance(value, Mapping):
        middle, low, high = (_show(value[name]) for name in ("median", "min", "max"))
        return (
            middle
            if low == high
            else Markup(f"{middle}<br><small>{low}-{high}</small>")
        )
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int | float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "; ".join(value) if isinstance(value, list) else str(value or "-")
