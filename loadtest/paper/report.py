"""The paper's tables and figures."""

import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from loadtest.engine.worker import STAGES
from loadtest.intervals import show_mean, show_ratio
from loadtest.page import describe_source, render_results, to_table
from loadtest.result_folder import ResultFolder

from .summary import (
    CELL,
    COLUMNS,
    PAPER,
    RUN,
    Record,
    judge,
    list_missing,
    measure_run,
    summarise,
)

_RATIOS = {
    "over_none": "over none",
    "over_best": "over the best baseline",
    "over_best_sd": "over the best SD",
}
_NAME = re.compile(r"(?:SD|TETRIS) k=(?P<k>\d+)(?: E=(?P<extra>\d+))?")


def write_report(store: ResultFolder) -> None:
    """Write `results.json`, `runs.csv`, `results.md` and `results.png`."""
    records = store.measurements()
    found = {"rows": summarise(records), "verdicts": judge(records)}
    results = store.write_results(found)
    runs = [{k: one[k] for k in RUN} | measure_run(one) for one in records]
    store.write("runs.csv", pd.DataFrame(runs).to_csv(index=False))
    store.write("results.md", render(results))
    source = describe_source(results["environment"])
    _draw(_by_cell(results), source, store.folder / "results.png")


def render(results: Mapping[str, Any]) -> str:
    """Return the page of what `results.json` holds."""
    return render_results(
        Path(__file__).parent,
        results,
        verdicts_table=to_table(_tabulate_verdicts(results["verdicts"])),
        tables={
            title: [to_table(one) for one in _tabulate(own)]
            for title, own in _by_cell(results).items()
        },
        missing=list_missing(results["settings"]),
    )


def _by_cell(results: Mapping[str, Any]) -> dict[str, list[Record]]:
    groups = itertools.groupby(results["rows"], operator.itemgetter(*CELL))
    return {f"{name}, batch cap {cap}": [*own] for (name, cap), own in groups}


def _tabulate_verdicts(verdicts: Sequence[Record]) -> Iterator[list[str]]:
    yield ["", "best TETRIS", "over", "the paper, at most", "here", ""]
    names = {
        "over_best": "the best of none, SD and DSD",
        "over_best_sd": "the best SD",
        "hidden_over_best": "the best of none, SD and DSD, drafting hidden",
    }
    for one in verdicts:
        for key, name in names.items():
            arm = one["hidden_arm" if key.startswith("hidden") else "arm"]
            place = f"{one['dataset']}, cap {one['cap']}"
            here = show_ratio(one[key], digits=3)
            yield [place, arm, name, f"{PAPER[key]:.4f}", here, _read(one[key], key)]


def _read(found: Mapping[str, Any], key: str) -> str:
    """Say whether a ratio agrees with the paper's."""
    low, high = found["low"], found["high"]
    if low is None:
        return "one run: cannot tell"
    if high < 1:
        return "disagrees: it loses"
    if low > PAPER[key]:
        return "more than the paper's most"
    if low > 1:
        return "agrees: it gains"
    return "cannot tell" if high >= PAPER[key] else "cannot tell; less than at most"


def _tabulate(rows: Sequence[Record]) -> Iterator[list[list[str]]]:
    """Yield speed, verification and stages, VSR by E, and windows."""
    names = [*COLUMNS]
    first = [*names[: names.index("vsr")], "hidden_tokens_per_s"]
    speeds = [["arm", "runs", *_RATIOS.values(), *(COLUMNS[k] for k in first)]]
    for row in rows:
        ratios = [show_ratio(row[k]) for k in _RATIOS]
        figures = [show_mean(row[k]) for k in first]
        speeds.append([row["arm"], row["runs"], *ratios, *figures])
    yield speeds
    second = [k for k in names if k not in first]
    parts = [
        ["arm", *(COLUMNS[k] for k in second), *(f"{stage}, %" for stage in STAGES)]
    ]
    for row in rows:
        stages = row["stages"] or {}
        shares = [f"{100 * stages[s]:.0f}" if s in stages else "" for s in STAGES]
        parts.append([row["arm"], *(show_mean(row[k]) for k in second), *shares])
    yield parts
    by_extra = [
        (int(match["k"]), int(match["extra"] or 0), show_mean(row["vsr"]))
        for row in rows
        if (match := _NAME.fullmatch(row["arm"]))
    ]
    if by_extra:
        table = pd.DataFrame(by_extra, columns=["k", "E", "vsr"])
        table = table.pivot(index="k", columns="E", values="vsr").fillna("")
        heads = ["VSR", *(f"E={extra}" if extra else "SD" for extra in table)]
        yield [heads, *([f"k={k}", *own] for k, *own in table.itertuples())]
    windows = {
        row["arm"]: np.array(row["windows"]) / sum(row["windows"])
        for row in rows
        if row["arm"].startswith("SD ") and sum(row["windows"])
    }
    if windows:
        most = max(map(len, windows.values()))
        heads = ["drafts accepted in a row, % of drafts", *map(str, range(most))]
        lines = [
            [arm, *(f"{100 * share:.0f}" for share in own), *[""] * (most - len(own))]
            for arm, own in windows.items()
        ]
        yield [heads, *lines]


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
