"""Writes results.json, runs.csv, results.md and results.png from a folder."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.intervals import show_mean, show_ratio
from loadtest.page import describe_source, render_results, to_png, to_table

from .run import Store
from .summary import TIMES, compare_goodput, summarise, tabulate

Row = Mapping[str, Any]


def write_report(store: Store) -> None:
    """Write everything there is to see."""
    units, conditions = store.units(), store.conditions()
    measured = store.measurements()[1:]
    if units is None or not measured or conditions is None:
        return
    kinds, arms = conditions["classes"], conditions["arms"]
    targets_ms = {k: one["target"] * units.tpot_ms for k, one in kinds.items()}
    blocks = tabulate(measured, targets_ms)
    store.write("runs.csv", blocks.to_csv(index=False, float_format="%.6g"))
    results = store.write_results(
        {
            "units": asdict(units),
            "targets_ms": targets_ms,
            "rows": summarise(blocks, arms),
            "over_best": compare_goodput(blocks, arms[-1]),
        }
    )
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
    page = render_results(Path(__file__).parent, results, tables=shown)
    store.write("results.md", page)
    (store.folder / "results.png").write_bytes(_draw(results))


def _by_load(results: Row, figure: str) -> list[list[str]]:
    """Return a line for each arm; for goodput one of our ratios too."""
    loads = sorted({row["load"] for row in results["rows"]})
    lines = [["", *(f"load {load:g}" for load in loads)]]
    for arm in results["settings"]["arms"]:
        own = {row["load"]: row for row in results["rows"] if row["arm"] == arm}
        lines.append([f"`{arm}`", *(show_mean(own[load][figure]) for load in loads)])
    if figure == "goodput_per_s":
        ratios = {
            one["load"]: f"{show_ratio(one)}, `{one['against']}`"
            for one in results["over_best"]
        }
        ours = results["settings"]["arms"][-1]
        told = [ratios.get(load, "") for load in loads]
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


def _draw(results: Row) -> bytes:
    """Draw goodput and each class's share within its target, against the load."""
    # Takes a while, which only who has results shall wait for.
    from loadtest.report.figures import draw_by_level, make_panels

    titles = {"goodput_per_s": "requests/s within their target"}
    for kind in results["settings"]["classes"]:
        titles[f"{kind}.kept"] = f"{kind}: share within its target"
    figure, panels = make_panels(titles, "arrivals, as a share of the capacity")
    for key, panel in panels.items():
        rows = [
            {"arm": row["arm"], "level": row["load"], key: _spread(row[key])}
            for row in results["rows"]
        ]
        draw_by_level(panel, rows, key)
        panel.set_ylim(bottom=0)
    return to_png(figure, describe_source(results["environment"]))


def _spread(estimate: Row) -> dict[str, float] | None:
    mean, half = estimate["mean"], estimate["half_width"] or 0.0
    if mean is None:
        return None
    return {"median": mean, "min": mean - half, "max": mean + half}
