"""Writes results.json, runs.csv, results.md and results.png from a folder."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.intervals import show_mean, show_ratio
from loadtest.page import describe_source, render_results, to_png, to_table

from .run import Store
from .summary import average_rounds, compare_goodput, summarise, tabulate, tell_verdict

Row = Mapping[str, Any]


def write_report(store: Store) -> None:
    """Write everything there is to see."""
    units, conditions = store.units(), store.conditions()
    measured = store.measurements()[1:]
    if units is None or not measured or conditions is None:
        return
    kinds, arms = conditions["classes"], conditions["arms"]
    targets_ms = {k: one["target"] * units.tpot_ms for k, one in kinds.items()}
    blocks = tabulate(measured, targets_ms, conditions)
    store.write("runs.csv", blocks.to_csv(index=False, float_format="%.6g"))
    rounds = average_rounds(blocks)
    counts = blocks.groupby("arm")[["differing", "requests"]].sum()
    others = blocks["other_cpu_share"]
    results = store.write_results(
        {
            "units": asdict(units),
            "targets_ms": targets_ms,
            "rows": summarise(rounds, arms),
            "over_best": compare_goodput(rounds, arms[-1]),
            "replies": counts.to_dict("index"),
            "other_cpu_share": {"mean": others.mean(), "max": others.max()},
        }
    )
    tables = to_table(_list_goodput(results)), to_table(_list_ratios(results))
    verdict = tell_verdict(results["over_best"])
    page = render_results(
        Path(__file__).parent, results, verdict=verdict, tables=tables
    )
    store.write("results.md", page)
    (store.folder / "results.png").write_bytes(_draw(results))


def _list_goodput(results: Row) -> list[list[str]]:
    """Return a line for each arm: goodput and share kept by load; replies."""
    loads = sorted({row["load"] for row in results["rows"]})
    lines = [["", *(f"load {load:g}" for load in loads), "differing replies"]]
    for arm in results["settings"]["arms"]:
        own = {row["load"]: row for row in results["rows"] if row["arm"] == arm}
        cells = [
            f"{show_mean(own[load]['goodput_per_s'])}, {own[load]['kept']['mean']:.0%}"
            for load in loads
        ]
        replies = results["replies"][arm]
        replies = f"{replies['differing']} of {replies['requests']}"
        lines.append([f"`{arm}`", *cells, replies])
    return lines


def _list_ratios(results: Row) -> list[list[str]]:
    """Return a line for each load: our ratio, the best other, how long they wait."""
    kinds = results["settings"]["classes"]
    arms = {"arm": "ours", "against": "the other"}
    heads = [f"`{kind}` {whose}" for kind in kinds for whose in arms.values()]
    lines = [["load", "times the best other", "which", *heads]]
    rows = {(row["load"], row["arm"]): row for row in results["rows"]}
    for one in results["over_best"]:
        waits = [
            show_mean(rows[one["load"], one[arm]][f"{kind}.ttft_p95_ms"])
            for kind in kinds
            for arm in arms
        ]
        load, against = f"{one['load']:g}", f"`{one['against']}`"
        lines.append([load, show_ratio(one), against, *waits])
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
