"""Writes results.json, runs.csv, results.md and results.png from a folder."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from loadtest.page import make_environment, to_table

from .run import Store
from .summary import TIMES, compare_with_best, summarise, tabulate

Row = Mapping[str, Any]


def write_report(store: Store) -> None:
    """Write everything there is to see."""
    units, groups = store.units(), store.groups()
    conditions, environment = store.conditions() or {}, store.environment()
    if units is None or not groups:
        return
    kinds = conditions["classes"]
    targets_ms = {k: one["target"] * units.tpot_ms for k, one in kinds.items()}
    blocks = tabulate([one for group in groups for one in group], targets_ms)
    store.write("runs.csv", blocks.to_csv(index=False, float_format="%.6g"))
    arms = conditions["arms"]
    results = store.write_results(
        {
            "environment": environment,
            "settings": conditions,
            "units": asdict(units),
            "targets_ms": targets_ms,
            "rows": summarise(blocks, arms),
            "over_best": compare_with_best(blocks, arms[-1]),
        }
    )
    template = make_environment(Path(__file__).parent).get_template("results.md.jinja")
    tables = {
        "Requests per second within their target": _by_load(results, "goodput_per_s"),
        **{
            f"Share of {name} requests within {targets_ms[name]:.1f} ms a token": (
                _by_load(results, f"{name}.kept")
            )
            for name in kinds
        },
        "Tokens per second": _by_load(results, "tokens_per_s"),
        "Times, ms": _list_times(results, kinds),
    }
    shown = {title: to_table(lines) for title, lines in tables.items()}
    store.write("results.md", template.render(results, tables=shown))
    _draw(results, store.folder / "results.png")


def _by_load(results: Row, figure: str) -> list[list[str]]:
    """Return a line for each arm; for goodput one of our ratios too."""
    loads = sorted({row["load"] for row in results["rows"]})
    lines = [["", *(f"load {load:g}" for load in loads)]]
    for arm in results["settings"]["arms"]:
        own = {row["load"]: row for row in results["rows"] if row["arm"] == arm}
        lines.append([f"`{arm}`", *(_tell(own[load][figure]) for load in loads)])
    if figure == "goodput_per_s":
        ratios = {one["load"]: one for one in results["over_best"]}
        ours = results["settings"]["arms"][-1]
        told = [_tell_ratio(ratios.get(load)) for load in loads]
        lines.append([f"`{ours}` over the best other policy", *told])
    return lines


def _list_times(results: Row, kinds: Row) -> list[list[str]]:
    columns = [f"{kind}.{time}" for kind in kinds for time in TIMES]
    heads = [name.removesuffix("_ms").replace(".", " ") for name in columns]
    lines = [["load", "arm", *(head.replace("_", " ") for head in heads)]]
    for row in results["rows"]:
        times = (
            "" if t is None else f"{t:.0f}" for t in (row[c]["mean"] for c in columns)
        )
        lines.append([f"{row['load']:g}", f"`{row['arm']}`", *times])
    return lines


def _tell(estimate: Mapping[str, float | None]) -> str:
    mean, half = estimate["mean"], estimate["half_width"]
    if mean is None:
        return ""
    digits = 2 if mean < 10 else 0
    around = "" if half is None else f" ± {half:.{digits}f}"
    return f"{mean:.{digits}f}{around}"


def _tell_ratio(one: Row | None) -> str:
    if one is None:
        return ""
    around = "" if one["low"] is None else f" ({one['low']:.2f} to {one['high']:.2f})"
    return f"{one['ratio']:.2f}{around}, `{one['against']}`"


def _draw(results: Row, path: Path) -> None:
    """Draw goodput and each class's share within its target, against the load."""
    from matplotlib.figure import Figure

    kinds = results["settings"]["classes"]
    panels = {"goodput_per_s": "requests/s within their target"}
    panels |= {f"{k}.kept": f"{k}: share within its target" for k in kinds}
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for panel, (key, title) in zip(axes, panels.items(), strict=True):
        for arm in results["settings"]["arms"]:
            rows = [row for row in results["rows"] if row["arm"] == arm]
            means = pd.DataFrame([row[key] for row in rows], dtype=float)
            loads, halves = [row["load"] for row in rows], means["half_width"].fillna(0)
            panel.errorbar(
                loads, means["mean"], halves, marker="o", capsize=2, label=arm
            )
        panel.set(title=title, xlabel="arrivals, as a share of the capacity")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
