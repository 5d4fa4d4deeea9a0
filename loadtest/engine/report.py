"""Writes results.json, results.md and results.png from what a folder holds."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from loadtest.intervals import show_ratio
from loadtest.page import describe_source, render_results, to_table
from loadtest.result_folder import ResultFolder

from .summary import ALL_LOADS, compare_with_others, find_ceilings, make_rows

Row = Mapping[str, Any]

_PANEL = (6.6, 4.2)
_KINDS = ("rows", "ratios", "over_best", "ceilings")
_DETAILS = {
    "policy": "{policy}",
    "requests": "{concurrency}",
    "tokens/s min-max": "{output_tokens_per_s[min]:.0f}-{output_tokens_per_s[max]:.0f}",
    "before → after a change": (
        "{output_tokens_per_s_by_phase[before][median]:.0f} → "
        "{output_tokens_per_s_by_phase[after][median]:.0f}"
    ),
    "measured s": "{window_s:.0f}",
    "step ms": "{step_ms:.1f}",
    "step-time error": "{step_time_error:.1%}",
    "planning µs/step": "{planning_us_per_step:.0f}",
    "verified/step": "{verified_per_step:.1f}",
    "calibration error": "{calibration_error:.3f}",
    "ITL p50 ms": "{itl_p50_ms:.1f}",
    "ITL p99 ms": "{itl_p99_ms:.1f}",
    "ms/token p50": "{time_per_token_p50_ms:.1f}",
    "replies": "{num_requests}",
    "differing": "{num_differing_requests:n}",
    "CPU of others": "{max_other_cpu_share:.1%}",
}


def write_report(store: ResultFolder) -> None:
    """Write everything there is to see."""
    draw(write_results(store), store.folder / "results.png")


def write_results(store: ResultFolder) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured.

    Returns:
        What results.json holds.
    """
    measurements = store.measurements()
    # Whoever comes last is compared with all others.
    ours = (store.conditions() or {})["policies"][-1]
    ratios, over_best = compare_with_others(measurements, ours)
    rows = make_rows(measurements)
    results = store.write_results(
        {
            "rows": rows,
            "ratios": ratios,
            "over_best": over_best,
            "ceilings": find_ceilings(rows),
        }
    )
    store.write("results.md", render(results))
    return results


def render(results: Mapping[str, Any]) -> str:
    """Render `results.md`."""
    loads = [
        {"name": name, "samples": _count_samples(load["rows"])}
        | {"tables": [*map(to_table, _tabulate(load))]}
        for name, load in _by_load(results).items()
    ]
    fallbacks = {
        f"{row['policy']}: {why}" for row in results["rows"] for why in row["fallbacks"]
    }
    own = {"loads": loads, "fallbacks": sorted(fallbacks)}
    return render_results(Path(__file__).parent, results, **own)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw two panels for each workload and temperature.

    Throughput, and what the last policy's is over the others', against requests in
    flight.
    """
    from loadtest.report.figures import draw_by_level

    loads = _by_load(results)
    size = (2 * _PANEL[0], len(loads) * _PANEL[1] + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(fill(describe_source(results["environment"]), 190), fontsize=7)
    grid = figure.subplots(len(loads), 2, squeeze=False)
    for panels, (name, load) in zip(grid, loads.items(), strict=True):
        rows = [
            {"arm": row["policy"], "level": row["concurrency"], **row}
            for row in load["rows"]
        ]
        ratios = [
            {"arm": one["against"], "level": one["concurrency"]}
            | {"ratio": {"median": one["ratio"], "min": one["low"], "max": one["high"]}}
            for one in load["ratios"]
            if one["concurrency"]
        ]
        ours = results["settings"]["policies"][-1]
        panels[1].axhline(1.0, color="#bbbbbb", linewidth=1)
        levels = sorted({row["level"] for row in rows})
        for panel, drawn, key, title in (
            (panels[0], rows, "output_tokens_per_s", _count_samples(rows)),
            (panels[1], ratios, "ratio", f"{ours} over the others, 95 % intervals"),
        ):
            draw_by_level(panel, drawn, key)
            panel.set_title(f"{name}: {title}", fontsize=8)
            panel.set_xscale("log", base=2)
            panel.set_xticks(levels, [str(level) for level in levels])
            panel.set_xlabel("requests in flight")
            panel.legend(fontsize=6, ncols=2)
            panel.grid(alpha=0.25)
        panels[0].set_ylabel("tokens/s")
    figure.savefig(path, dpi=110)


def _count_samples(rows: Sequence[Row]) -> str:
    """Say how much was measured: requests of a policy, rounds and engine starts."""
    requests = [row["num_requests"] for row in rows]
    starts = min(row["engine_starts"] or 0 for row in rows)
    return (
        f"{min(requests)} to {max(requests)} requests, "
        f"{min(row['rounds'] for row in rows)} rounds, "
        f"{starts or 'unknown'} engine starts a policy"
    )


def _by_load(results: Mapping[str, Any]) -> dict[str, dict[str, list[Row]]]:
    """Return rows, ratios and ceilings by workload with temperature."""
    found: dict[str, dict[str, list[Row]]] = {}
    for kind in _KINDS:
        # Older results know no ceilings.
        for one in results.get(kind, ()):
            name = f"{one['workload']}, temperature {one['temperature']:g}"
            found.setdefault(name, {kind: [] for kind in _KINDS})[kind].append(one)
    return found


def _tabulate(load: Mapping[str, list[Row]]) -> list[list[list[str]]]:
    """Return the tables of a workload: speeds, ratios, ceilings, details.

    Of the best policy of a load the speed is bold; in brackets stand acceptance length
    and verification success rate.
    """
    rows, ratios = load["rows"], load["ratios"]
    medians = pd.Series([row["output_tokens_per_s"]["median"] for row in rows])
    best = medians.groupby([row["concurrency"] for row in rows]).transform("max")
    speeds = []
    for row, median, is_best in zip(rows, medians, medians == best, strict=True):
        text = f"**{median:.0f}**" if is_best else f"{median:.0f}"
        if None not in (row["verified_per_step"], row["acceptance_length"]):
            success = row["verification_success_rate"]
            share = "-" if success is None else f"{success:.2f}".removeprefix("0")
            text += f" ({row['acceptance_length']:.2f}, {share})"
        speeds.append((row["policy"], row["concurrency"], text))

    show = partial(show_ratio, digits=3, to="-")
    over = [(one["against"], one["concurrency"], show(one)) for one in ratios]
    over += [
        ("the best other", one["concurrency"], f"{show(one)}, {one['against']}")
        for one in load["over_best"]
    ]
    most = [
        (one["policy"], one["concurrency"], f"{one['ratio']:.2f}")
        for one in load["ceilings"]
    ]
    ours = ratios[0]["policy"] if ratios else ""
    tables = [
        _by_concurrency(corner, cells)
        for corner, cells in (
            ("tokens/s (acceptance length, verification success rate)", speeds),
            (f"{ours} over", over),
            ("over none, were all drafts accepted", most),
        )
        if cells
    ]
    details = [[_fill(form, row) for form in _DETAILS.values()] for row in rows]
    return [*tables, [[*_DETAILS], *details]]


def _fill(form: str, row: Row) -> str:
    try:
        return form.format_map(row)
    except TypeError:  # Of None: nobody counted.
        return "-"


def _by_concurrency(
    corner: str, cells: Sequence[tuple[str, int, str]]
) -> list[list[str]]:
    """Return texts by name and load; all loads together come last."""
    table = pd.DataFrame(cells, columns=["name", "load", "text"])
    loads = sorted(table["load"].unique(), key=lambda load: load or math.inf)
    table = table.pivot(index="name", columns="load", values="text")
    table = table.reindex(
        index=dict.fromkeys(name for name, *_ in cells), columns=loads
    )
    names = {1: "1 request", ALL_LOADS: "all loads"}
    head = [corner, *(names.get(load, f"{load} requests") for load in loads)]
    return [head, *map(list, table.fillna("-").reset_index().itertuples(index=False))]
