"""One page of plots: throughput, ratios and calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from .outcome_bins import add_up_bins
from .report import Row, count_samples, describe, loads_of, under
from .summary import ALL_LOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "none": "#555555",
    "dynamic": "#2f9e44",
    "tetris": "#e8590c",
    "goodput": "#c2255c",
    "cold": "#0c8599",
    "adaptive": "#f08c00",
}
_FIXED_COLOURS = ("#a5d8ff", "#74c0fc", "#339af0", "#1c7ed6", "#1864ab", "#0b3a66")
_LINE_STYLES = ("-", "--", ":", "-.")
_PANEL = (4.6, 3.4)
_DPI = 110


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a line of panels for each workload and temperature.

    Throughput, and what the last policy's is over the others', against requests in
    flight; acceptance as it was predicted against what happened.
    """
    from matplotlib.figure import Figure

    loads = loads_of(results["rows"])
    size = (3 * _PANEL[0], len(loads) * _PANEL[1] + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(fill(describe(results), 190), fontsize=7)
    panels = figure.subplots(len(loads), 3, squeeze=False)
    for (speeds, over_others, calibration), load in zip(panels, loads, strict=True):
        name = f"{load[0]}, T = {load[1]:g}"
        rows, ratios = under(results["rows"], *load), under(results["ratios"], *load)
        _draw_lines(speeds, rows, "policy", _speed)
        speeds.set_ylim(bottom=0)
        _label(speeds, f"{name}: {count_samples(rows)}", "requests", "tokens/s")
        ours = ratios[-1]["policy"] if ratios else "-"
        own = [one for one in ratios if one["policy"] == ours]
        own = [one for one in own if one["concurrency"] != ALL_LOADS]
        _draw_lines(over_others, own, "against", _ratio)
        over_others.axhline(1.0, color="#bbbbbb", linewidth=1)
        title = f"{name}: {ours} over the others, with 95 % intervals"
        _label(over_others, title, "requests", "ratio")
        _draw_calibration(calibration, rows)
        what = "predicted acceptance (dotted: the drafter's confidence)"
        _label(calibration, f"{name}: calibration", what, "observed")
    figure.savefig(path, dpi=_DPI)


def _draw_lines(
    panel: Axes,
    rows: Sequence[Row],
    by: str,
    read: Callable[[Row], tuple[float, float, float]],
) -> None:
    """Draw a line for each policy, with bars; beside each other so that they show.

    Args:
        panel: To draw on.
        rows: A point each.
        by: Which field names the policy.
        read: Returns a value and the ends of its bar.
    """
    names = list(dict.fromkeys(row[by] for row in rows))
    for number, name in enumerate(names):
        line = sorted(
            (row for row in rows if row[by] == name),
            key=lambda row: int(row["concurrency"]),
        )
        apart = 1.0 + 0.012 * (number - len(names) / 2)
        points = [read(row) for row in line]
        panel.errorbar(
            [apart * row["concurrency"] for row in line],
            [value for value, _, _ in points],
            yerr=[
                [v - low for v, low, _ in points],
                [high - v for v, _, high in points],
            ],
            label=name,
            marker="o",
            markersize=2.5,
            elinewidth=0.8,
            **_style(name),
        )
    ticks = sorted({row["concurrency"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    if names:
        panel.legend(fontsize=6, ncols=2)


def _speed(row: Row) -> tuple[float, float, float]:
    """Return median, smallest and largest."""
    speed = row["output_tokens_per_s"]
    return speed["median"], speed["min"], speed["max"]


def _ratio(row: Row) -> tuple[float, float, float]:
    """Return the ratio with its interval; a single round has none."""
    ratio = row["ratio"]
    return ratio, row["low"] or ratio, row["high"] or ratio


def _draw_calibration(panel: Axes, rows: Sequence[Row]) -> None:
    """Draw a line for each number of requests, of `goodput`.

    Pooled, one that predicts too much and one that predicts too little would look
    exact.
    """
    panel.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
    own = [row for row in rows if row["policy"].startswith("goodput")]
    for number, row in enumerate(own):
        for name, form in (("calibration_bins", "o-"), ("confidence_bins", ":")):
            curve = add_up_bins([row[name]]).curve() if row[name] else None
            if curve is None:
                continue
            label = (
                f"{row['concurrency']} in flight, n = {curve.count.sum():.0f}: error "
                f"{curve.error:.3f} (by chance {curve.exact_error:.3f})"
            )
            panel.plot(
                curve.predicted,
                curve.observed,
                form,
                color=f"C{number}",
                markersize=3,
                label=label if form == "o-" else None,
            )
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=6)


def _label(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=7)
    panel.set_xlabel(x, fontsize=7)
    panel.set_ylabel(y, fontsize=7)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)


def _style(name: str) -> dict[str, Any]:
    policy, _, tokens = name.partition(":")
    number = int(tokens.partition("+")[0] or 1)
    if policy == "fixed":
        shade = min(number, len(_FIXED_COLOURS)) - 1
        return {"color": _FIXED_COLOURS[shade], "linewidth": 1.2}
    return {
        "color": _COLOURS.get(policy, "black"),
        "linewidth": 1.8,
        "linestyle": _LINE_STYLES[(number - 1) % 4] if policy == "tetris" else "-",
    }
