"""One page of plots: throughput and ratios."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from .report import by_load, count_samples, describe

_PANEL = (6.6, 4.2)
_DPI = 110


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw two panels for each workload and temperature.

    Throughput, and what the last policy's is over the others', against requests in
    flight.
    """
    from matplotlib.figure import Figure

    from loadtest.report.figures import draw_by_level

    loads = by_load(results)
    size = (2 * _PANEL[0], len(loads) * _PANEL[1] + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(fill(describe(results), 190), fontsize=7)
    panels = figure.subplots(len(loads), 2, squeeze=False)
    for (speeds, over_others), (name, load) in zip(panels, loads.items(), strict=True):
        rows = [
            {"arm": row["policy"], "level": row["concurrency"], **row}
            for row in load["rows"]
        ]
        ratios = [
            {
                "arm": one["against"],
                "level": one["concurrency"],
                "ratio": {
                    "median": one["ratio"],
                    "min": one["low"],
                    "max": one["high"],
                },
            }
            for one in load["ratios"]
            if one["concurrency"]
        ]
        draw_by_level(speeds, rows, "output_tokens_per_s")
        speeds.set_title(f"{name}: {count_samples(rows)}", fontsize=8)
        speeds.set_ylabel("tokens/s")
        draw_by_level(over_others, ratios, "ratio")
        over_others.axhline(1.0, color="#bbbbbb", linewidth=1)
        title = f"{name}: {results['settings']['policies'][-1]} over the others"
        over_others.set_title(f"{title}, 95 % intervals", fontsize=8)
        levels = sorted({row["level"] for row in rows})
        for panel in (speeds, over_others):
            panel.set_xscale("log", base=2)
            panel.set_xticks(levels, [str(level) for level in levels])
            panel.set_xlabel("requests in flight")
            panel.legend(fontsize=6, ncols=2)
            panel.grid(alpha=0.25)
    figure.savefig(path, dpi=_DPI)
