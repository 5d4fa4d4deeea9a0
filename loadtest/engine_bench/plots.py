"""Plots of results and traces, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .arms import Arm, parse_bench_arm
from .outcome_bins import Array, bin_outcomes
from .plan import PLANNING, Cell
from .traces import RecordedTrace, Traces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_COLOURS = {
    "none": "#555555",
    "dynamic": "#2f9e44",
    "tetris": "#e8590c",
    "goodput": "#c2255c",
    "cold": "#0c8599",
    "warm": "#f08c00",
}
_FIXED_COLOURS = ("#a5d8ff", "#74c0fc", "#339af0", "#1c7ed6", "#1864ab", "#0b3a66")
_LINE_STYLES = ("-", "--", ":", "-.")
_PANEL = (4.6, 3.4)
_DPI = 130


def draw_all(folder: Path, rows: Sequence[Row], traces: Traces) -> list[Path]:
    """Draw every plot there is data for.

    Args:
        folder: Where the files go.
        rows: Of `results.json`.
        traces: By cell and arm.

    Returns:
        The files written.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figures = {
        "throughput.png": _draw_throughput(rows),
        "calibration.png": _draw_calibration(traces),
        "decisions.png": _draw_decisions(traces),
        "step_time.png": _draw_step_time(traces),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=_DPI)
            written.append(folder / name)
    return written


def _draw_throughput(rows: Sequence[Row]) -> Figure | None:
    """Tokens per second against concurrency, a line per policy, a panel per load."""
    loads = [
        load
        for load in dict.fromkeys((row["workload"], row["temperature"]) for row in rows)
        if load[0] != PLANNING  # One policy at one point is no line.
    ]
    if not loads:
        return None
    figure, panels = _panels(len(loads))
    for (workload, temperature), panel in zip(loads, panels, strict=True):
        load = (workload, temperature)
        own = [row for row in rows if (row["workload"], row["temperature"]) == load]
        for arm in _arms_of(own):
            line = sorted(
                (row for row in own if row["policy"] == arm.name),
                key=lambda row: int(row["concurrency"]),
            )
            speeds = [row["output_tokens_per_s"] for row in line]
            xs = [row["concurrency"] for row in line]
            style = _style(arm)
            panel.plot(
                xs,
                [speed["median"] for speed in speeds],
                marker="o",
                markersize=3,
                label=arm.name,
                **style,
            )
            panel.fill_between(
                xs,
                [speed["min"] for speed in speeds],
                [speed["max"] for speed in speeds],
                color=style["color"],
                alpha=0.12,
                linewidth=0,
            )
        panel.set_xscale("log", base=2)
        ticks = sorted({row["concurrency"] for row in own})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_ylim(bottom=0)
        _label(panel, f"{workload}, T = {temperature:g}", "requests", "tokens/s")
    panels[0].legend(fontsize=7)
    return figure


def _draw_calibration(traces: Traces) -> Figure | None:
    """Observed against predicted acceptance, a line per number of requests.

    Each load has its own: pooled, one that predicts too much and one that predicts too
    little would look exact.
    """
    by_load: dict[str, list[tuple[Cell, RecordedTrace]]] = {}
    for cell, by_arm in traces.items():
        for arm, trace in by_arm.items():
            if arm.policy == "goodput":
                load = f"{cell.workload}, T = {cell.temperature:g}"
                by_load.setdefault(load, []).append((cell, trace))
    if not by_load:
        return None
    figure, panels = _panels(len(by_load))
    for (load, own), panel in zip(by_load.items(), panels, strict=True):
        panel.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1)
        for number, (cell, trace) in enumerate(own):
            raw = bin_outcomes(*trace.outcomes("confidence"))
            curve = bin_outcomes(*trace.outcomes("predicted"))
            colour = f"C{number}"
            if raw is not None:
                panel.plot(raw.predicted, raw.observed, ":", color=colour, linewidth=1)
            if curve is not None:
                label = (
                    f"{cell.concurrency} in flight: error {curve.error:.3f} "
                    f"(by chance {curve.exact_error:.3f})"
                )
                xs, ys = curve.predicted, curve.observed
                panel.plot(xs, ys, "o-", color=colour, markersize=3, label=label)
        _label(panel, load, "predicted (dotted: drafter's confidence)", "observed")
        panel.legend(fontsize=6)
    return figure


def _draw_decisions(traces: Traces) -> Figure | None:
    """Draft depth and verified drafts per request over time, of adaptive policies."""
    shown = [
        (cell, arm, trace)
        for cell, by_arm in traces.items()
        for arm, trace in by_arm.items()
        if arm.policy in ("goodput", "dynamic")
    ]
    if not shown:
        return None
    figure, panels = _panels(len(shown))
    for (cell, arm, trace), panel in zip(shown, panels, strict=True):
        time_s = trace.time_s()
        num_reqs = np.maximum(trace.step("num_reqs"), 1)
        per_req = np.nan_to_num(trace.step("admitted")) / num_reqs
        panel.plot(
            time_s,
            per_req,
            color="#1c7ed6",
            linewidth=0.7,
            label="verified drafts per request",
        )
        panel.step(
            time_s,
            trace.step("depth"),
            where="post",
            color="#c2255c",
            linewidth=1,
            label="draft depth",
        )
        panel.set_ylim(0, arm.max_depth + 0.5)
        _label(panel, f"{arm.name}, {cell.name}", "s", "draft tokens")
    panels[0].legend(fontsize=7)
    return figure


def _draw_step_time(traces: Traces) -> Figure | None:
    """Measured against predicted step time, a colour per concurrency."""
    by_arm: dict[Arm, list[tuple[Cell, RecordedTrace]]] = {}
    for cell, own in traces.items():
        for arm, trace in own.items():
            if not np.isnan(trace.step("predicted_ms")).all():
                by_arm.setdefault(arm, []).append((cell, trace))
    if not by_arm:
        return None
    figure, panels = _panels(len(by_arm))
    for (arm, cells), panel in zip(by_arm.items(), panels, strict=True):
        concurrencies = sorted({cell.concurrency for cell, _ in cells})
        steps_ms: list[Array] = []
        for number, concurrency in enumerate(concurrencies):
            own_traces = [t for cell, t in cells if cell.concurrency == concurrency]
            predicted = np.concatenate([t.step("predicted_ms") for t in own_traces])
            measured = np.concatenate([t.step("total_ms") for t in own_traces])
            panel.plot(
                predicted,
                measured,
                ".",
                markersize=2,
                alpha=0.5,
                color=f"C{number}",
                label=f"{concurrency} request{'s' if concurrency > 1 else ''}",
            )
            steps_ms += [predicted, measured]
        # Steps with a long prompt take many times as long as those that decode.
        panel.set_xscale("log")
        panel.set_yscale("log")
        ends = np.nanpercentile(np.concatenate(steps_ms), [0.5, 99.5]).tolist()
        panel.plot(ends, ends, color="#888888", linewidth=1)
        _label(panel, arm.name, "predicted step time, ms", "measured step time, ms")
        panel.legend(fontsize=7)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, three in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, count)
    lines = -(-count // columns)
    size = (_PANEL[0] * columns, _PANEL[1] * lines)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, n + 1) for n in range(count)]


def _label(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)


def _arms_of(rows: Sequence[Row]) -> list[Arm]:
    names = dict.fromkeys(row["policy"] for row in rows)
    return [parse_bench_arm(name) for name in names]


def _style(arm: Arm) -> dict[str, Any]:
    if arm.policy == "fixed":
        shade = min(arm.draft_tokens, len(_FIXED_COLOURS)) - 1
        return {"color": _FIXED_COLOURS[shade], "linewidth": 1.2}
    style = _LINE_STYLES[(arm.draft_tokens - 1) % len(_LINE_STYLES)]
    return {
        "color": _COLOURS.get(arm.policy, "black"),
        "linewidth": 1.8,
        "linestyle": style if arm.policy == "tetris" else "-",
    }
