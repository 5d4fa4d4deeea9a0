"""From runs to the paper's tables and figures."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from loadtest.engine.measurement import list_latencies
from loadtest.engine.worker import STAGES
from loadtest.intervals import (
    compare_columns,
    estimate_mean,
    show_mean,
    show_ratio,
)
from loadtest.page import describe_source, render_results, to_table
from loadtest.result_folder import ResultFolder

Record = Mapping[str, Any]

CELL = ["dataset", "cap"]
RUN = ["run", *CELL, "arm"]

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "ttft_mean_ms": "TTFT mean, ms",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "TPOT mean, ms",
    "tpot_p99_ms": "p99",
    "e2e_mean_ms": "whole, mean, ms",
    "e2e_p99_ms": "p99",
    "vsr": "VSR",
    "ter": "TER",
    "system_efficiency": "system efficiency",
    "hidden_tokens_per_s": "tokens/s, drafting hidden",
}
"""Figures of a run, and what tables call them."""


def measure_run(record: Record) -> dict[str, float]:
    """Return the figures of a run, `COLUMNS`; NaN where nobody counted."""
    requests = list_latencies(record)
    latencies = requests.drop(columns="tokens")
    latencies.columns = latencies.columns.str.removesuffix("_ms")
    found = {f"{name}_mean_ms": mean for name, mean in latencies.mean().items()}
    found |= {f"{k}_p99_ms": v for k, v in latencies.quantile(0.99).items()}
    counted, spent = record["counters"] or {}, record["stages_ms"] or {}
    verified, accepted = (
        counted.get(f"num_{what}_tokens", 0) for what in ("verified", "accepted")
    )
    target_ms = spent.get("score", 0.0) + spent.get("verify", 0.0)
    hidden_s = min(spent.get("draft", np.nan), target_ms) / 1e3
    total = requests["tokens"].sum()
    # Every step of a request puts out the drafts accepted, and one token more.
    rows = total - accepted + verified
    found |= {
        "tokens_per_s": total / record["seconds"],
        "vsr": accepted / verified if verified else np.nan,
        "ter": 1e3 * total / target_ms if target_ms else np.nan,
        "system_efficiency": total / rows if spent else np.nan,
        "hidden_tokens_per_s": total / (record["seconds"] - hidden_s),
    }
    return {name: float(found[name]) for name in COLUMNS}


def summarise(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each dataset, cap and arm: figures, stages, ratios.

    `over_none` and `over_best_sd` are throughput ratios; the best fixed length is the
    one that did best on average in that cell, which knows the outcome.
    """
    rows = []
    figures = pd.DataFrame(map(measure_run, records))
    frame = pd.DataFrame(records)[[*RUN, "counters", "stages_ms"]].join(figures)
    for cell, own in frame.groupby(CELL, sort=False):
        speeds = own.pivot(index="run", columns="arm", values="tokens_per_s")
        fixed = [arm for arm in speeds if arm.startswith("SD ")]
        best = speeds[fixed].mean().idxmax() if fixed else None
        for arm, runs in own.groupby("arm", sort=False):
            stages = pd.DataFrame([one or {} for one in runs["stages_ms"]]).sum()
            windows = pd.DataFrame(map(_count_windows, runs["counters"])).sum()
            rows.append(
                dict(zip(CELL, cell, strict=True))
                | {"arm": arm, "runs": len(runs), "best_sd": best}
                | {name: estimate_mean(runs[name]) for name in COLUMNS}
                | {"over_none": compare_columns(speeds, arm, "none")}
                | {"over_best_sd": compare_columns(speeds, arm, best)}
                | {"stages": (stages / stages.sum()).to_dict() or None}
                | {"windows": windows.astype(int).tolist()}
            )
    return rows


def _count_windows(counted: Record | None) -> list[int]:
    """Return how many drafts had 0, 1, ... tokens accepted."""
    counted = counted or {}
    reached = counted.get("num_accepted_tokens_per_pos", [])
    reached = [counted.get("num_drafts", 0), *reached, 0]
    return [a - b for a, b in itertools.pairwise(reached)]


def write_report(store: ResultFolder) -> None:
    """Write `results.json`, `runs.csv`, `results.md` and `results.png`."""
    records = store.records()
    results = store.write_results({"rows": summarise(records)})
    runs = [{k: one[k] for k in RUN} | measure_run(one) for one in records]
    store.write("runs.csv", pd.DataFrame(runs).to_csv(index=False))
    groups = itertools.groupby(results["rows"], operator.itemgetter(*CELL))
    cells = {f"{name}, batch cap {cap}": [*own] for (name, cap), own in groups}
    tables = {title: to_table(_tabulate(own)) for title, own in cells.items()}
    page = render_results(Path(__file__).parent, results, tables=tables)
    store.write("results.md", page)
    source = describe_source(results["environment"])
    _draw(cells, source, store.folder / "results.png")


def _tabulate(rows: Sequence[Record]) -> list[list[str]]:
    heads = ["arm", "over none", "over the best SD", *COLUMNS.values()]
    lines = [[*heads, *(f"{stage}, %" for stage in STAGES)]]
    for row in rows:
        ratios = [show_ratio(row[k]) for k in ("over_none", "over_best_sd")]
        stages = row["stages"] or {}
        shares = [f"{100 * stages[s]:.0f}" if s in stages else "" for s in STAGES]
        figures = [show_mean(row[k]) for k in COLUMNS]
        lines.append([row["arm"], *ratios, *figures, *shares])
    return lines


def _draw(cells: Mapping[str, Sequence[Record]], title: str, path: Path) -> None:
    """Draw, for each cell, throughput, accepted lengths and time by stage."""
    figure = Figure(figsize=(18, 5 * len(cells)), layout="constrained")
    figure.suptitle(title, fontsize=8)
    grid = figure.subplots(len(cells), 3, squeeze=False)
    for (name, own), (speed, windows, stages) in zip(cells.items(), grid, strict=True):
        arms = [row["arm"] for row in own]
        table = pd.DataFrame([row["tokens_per_s"] for row in own], arms, dtype=float)
        halves = table["half_width"].fillna(0.0)
        table["mean"].plot.barh(ax=speed, xerr=halves, color="#4c78a8", width=0.8)
        speed.set(title=name, xlabel="tokens/s, 95 % intervals")
        for row in own:
            if row["arm"].startswith("SD ") and sum(row["windows"]):
                shares = np.array(row["windows"]) / sum(row["windows"])
                windows.plot(shares, marker="o", label=row["arm"])
        windows.set(title="best window: drafts accepted in a row", ylabel="share")
        if windows.lines:
            windows.legend(fontsize=7)
        spent = pd.DataFrame([row["stages"] or {} for row in own], arms, [*STAGES])
        spent.astype(float).plot.barh(ax=stages, stacked=True, width=0.8)
        stages.set(title="time by stage", xlabel="share")
        stages.legend(fontsize=7)
        for panel in (speed, stages):
            panel.invert_yaxis()
    figure.savefig(path, dpi=100)
