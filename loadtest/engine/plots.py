"""One page of plots: throughput and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .report import Row, by_load, count_samples, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL = (6.6, 4.2)
_DPI = 110


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw two panels for each workload and temperature.

    Throughput, and what the last policy's is over the others', against requests in
    flight.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    policies = dict.fromkeys(row["policy"] for row in results["rows"])
    colours = {name: colormaps["tab20"](n % 20) for n, name in enumerate(policies)}
    loads = by_load(results)
    size = (2 * _PANEL[0], len(loads) * _PANEL[1] + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(fill(describe(results), 190), fontsize=7)
    panels = figure.subplots(len(loads), 2, squeeze=False)
    for (speeds, over_others), (name, load) in zip(panels, loads.items(), strict=True):
        rows, ratios = load["rows"], load["ratios"]
        spreads = [{**row, **row["output_tokens_per_s"]} for row in rows]
        _draw(speeds, spreads, "policy", ("median", "min", "max"), colours)
        speeds.set_title(f"{name}: {count_samples(rows)}", fontsize=8)
        speeds.set_ylabel("tokens/s")
        if ratios:
            own = [one for one in ratios if one["concurrency"]]
            _draw(over_others, own, "against", ("ratio", "low", "high"), colours)
            over_others.axhline(1.0, color="#bbbbbb", linewidth=1)
            title = f"{name}: {ratios[0]['policy']} over the others, 95 % intervals"
            over_others.set_title(title, fontsize=8)
    figure.savefig(path, dpi=_DPI)


def _draw(
    panel: Axes,
    rows: Sequence[Row],
    by: str,
    fields: tuple[str, str, str],
    colours: Mapping[str, Any],
) -> None:
    """Draw a line for each policy: a value, and the ends of its bar."""
    order = list(dict.fromkeys(row[by] for row in rows))
    frame = pd.DataFrame(rows).astype(dict.fromkeys(fields, float))
    tables = [
        frame.pivot(index="concurrency", columns=by, values=field)[order]
        for field in fields
    ]
    value, low, high = tables
    bars = np.stack([value - low, high - value]).transpose(2, 0, 1)
    value.plot(ax=panel, yerr=bars, marker="o", markersize=3, color=colours)
    panel.set_xscale("log", base=2)
    panel.set_xticks(value.index, [str(load) for load in value.index])
    panel.set_xlabel("requests in flight")
    panel.legend(fontsize=6, ncols=2)
    panel.grid(alpha=0.25)
