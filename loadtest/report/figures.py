"""Figures of a report, as PNG bytes. Each says on what it was measured."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.client.outcome import Outcome
from loadtest.client.records import Records

from .summary import Targets, delivery_times, latencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

_COLOURS = ("#555555", "#1c7ed6", "#e8590c", "#c2255c", "#2f9e44", "#7048e8", "#0c8599")
_LINES = ("-", "--", ":", "-.")
"""One more of them each time that the colours are used up."""

_PANEL_INCHES = (4.4, 3.1)
_DPI = 110
_NUM_BINS = 60
_FAR = 3.0

_AGAINST_LOAD = {
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p95_ms": "TTFT p95, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p95_ms": "TPOT p95, ms",
    "itl_p99_ms": "ITL p99, ms",
    "e2e_p95_ms": "end to end p95, ms",
    "output_tokens_per_s": "output tokens/s",
    "goodput_per_s": "goodput, requests/s",
    "acceptance_length": "acceptance length",
}
_DISTRIBUTIONS = {
    "ttft": "TTFT, ms",
    "itl": "inter-token latency, ms",
    "tpot": "TPOT, ms",
    "e2e": "end to end, ms",
}
_OVER_TIME = {
    "in_flight": "requests in flight",
    "tokens": "output tokens/s",
    "ttft": "TTFT p95, ms",
    "failed": "requests failed",
    "replicas": "replicas running",
    "drafts": "verified and accepted draft tokens/s",
}
_SOAK = {
    "memory_mib": "private memory, MiB",
    "num_fds": "file descriptors",
    "num_threads": "threads",
}


def draw_against_load(
    rows: Sequence[Row], targets: Targets, caption: str = ""
) -> bytes | None:
    """Draw figures against the level of constant loads, a line for each arm.

    Whiskers span the rounds, hollow marks are runs that the client spoilt, dashed
    lines are targets.

    Returns:
        None if there are no two constant loads to join.
    """
    rows = [row for row in rows if row["level"] is not None]
    if len({row["level"] for row in rows}) < 2:
        return None
    unit = "requests/s" if rows[0]["is_open"] else "requests in flight"
    figure, panels = _make_panels(_AGAINST_LOAD, unit)
    for key, panel in panels.items():
        for arm, style in styles_of(row["arm"] for row in rows).items():
            known = [r for r in rows if r["arm"] == arm and r.get(key) is not None]
            own = sorted(known, key=lambda row: row["level"])
            if not own:
                continue
            levels = [row["level"] for row in own]
            found = pd.DataFrame([row[key] for row in own])
            middle = found["median"]
            whiskers = middle - found["min"], found["max"] - middle
            panel.errorbar(levels, middle, whiskers, label=arm, capsize=2, **style)
            for row, level, value in zip(own, levels, middle, strict=True):
                face = style["color"] if row["is_valid"] else "white"
                panel.plot(level, value, "o", color=style["color"], mfc=face, ms=4)
        limit = {"ttft": targets.ttft_ms, "tpot": targets.tpot_ms}.get(key[:4])
        if limit is not None and limit < _FAR * panel.get_ylim()[1]:
            panel.axhline(limit, color="#999999", linestyle="--", linewidth=1)
        elif limit is not None:
            # It would flatten everything else.
            panel.set_xlabel(f"{unit}; target {limit:g} ms, far above", fontsize=8)
        panel.set_xticks(sorted({row["level"] for row in rows}))
        panel.set_ylim(bottom=0)
    return _to_png(figure, caption)


def draw_distributions(
    by_arm: Mapping[str, Sequence[Outcome]], caption: str = ""
) -> bytes | None:
    """Draw the distribution functions of one cell's latencies."""
    figure, panels = _make_panels(_DISTRIBUTIONS, "", columns=4)
    has_drawn = False
    for arm, style in styles_of(by_arm).items():
        for kind, values in latencies(by_arm[arm]).items():
            if values:
                panels[kind].ecdf(values, label=arm, **style)
                has_drawn = True
    return _to_png(figure, caption) if has_drawn else None


def draw_timeline(
    records: Mapping[str, Records],
    runs: Mapping[str, Mapping[str, Any]],
    duration_s: float,
    caption: str = "",
) -> bytes | None:
    """Draw one round of a cell over time, by arm; chaos makes vertical lines."""
    if not any(one.outcomes for one in records.values()):
        return None
    figure, panels = _make_panels(_OVER_TIME, "s")
    for arm, style in styles_of(records).items():
        if records[arm].outcomes:
            epoch_s = records[arm].epoch_s or 0.0
            _draw_clients(panels, arm, records[arm].outcomes, duration_s, style)
            _draw_server(panels, runs[arm]["timeline"], epoch_s, style)
            for blow in runs[arm]["chaos"]:
                if blow["epoch_s"] is not None:
                    for panel in panels.values():
                        panel.axvline(blow["epoch_s"] - epoch_s, color="r", ls=":")
    for panel in panels.values():
        panel.set_xlim(0, duration_s)
        panel.set_ylim(bottom=0)
    return _to_png(figure, caption)


def draw_soak(samples: Sequence[Row], caption: str = "") -> bytes | None:
    """Draw memory, file descriptors and threads of every role over time."""
    if not samples:
        return None
    figure, panels = _make_panels(_SOAK, "minutes")
    table = pd.DataFrame(samples)
    table["minutes"] = (table["epoch_s"] - table["epoch_s"].iloc[0]) / 60
    for role, style in styles_of(table["role"]).items():
        own = table[table["role"] == role]
        for key, panel in panels.items():
            panel.plot(own["minutes"], own[key], label=role, **style)
            panel.set_ylim(bottom=0)
    return _to_png(figure, caption)


def styles_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return for every name, in order, the colour and line that tell it apart."""
    styles = {}
    for number, name in enumerate(dict.fromkeys(names)):
        turn, place = divmod(number, len(_COLOURS))
        line = _LINES[turn % len(_LINES)]
        styles[name] = {"color": _COLOURS[place], "linestyle": line, "linewidth": 1.3}
    return styles


def _draw_clients(
    panels: Mapping[str, Axes],
    arm: str,
    outcomes: Sequence[Outcome],
    duration_s: float,
    style: Mapping[str, Any],
) -> None:
    edges = np.linspace(0, duration_s, _NUM_BINS + 1)
    begins, ends = (
        np.searchsorted(np.sort(times), edges, "right")
        for times in ([o.sent_s for o in outcomes], [o.end_s for o in outcomes])
    )
    panels["in_flight"].step(edges, begins - ends, label=arm, **style)
    parts = [
        (time_s, outcome.output_tokens / max(1, outcome.num_deliveries))
        for outcome in outcomes
        for time_s in delivery_times(outcome)
    ]
    times, weights = np.reshape(parts, (-1, 2)).T
    tokens = np.histogram(times, edges, weights=weights)[0] / np.diff(edges)
    panels["tokens"].step(edges[1:], tokens, **style)
    due = pd.cut([o.scheduled_s for o in outcomes], edges, include_lowest=True)
    ttfts = pd.Series([o.ttft_ms for o in outcomes], dtype=float)
    late = ttfts.groupby(due, observed=False).quantile(0.95)
    panels["ttft"].plot(edges[1:], late.to_numpy(), marker=".", markersize=3, **style)
    failed = [o.end_s for o in outcomes if o.is_failed]
    panels["failed"].step(edges[1:], np.histogram(failed, edges)[0], **style)


def _draw_server(
    panels: Mapping[str, Axes],
    timeline: Sequence[Mapping[str, float]],
    epoch_s: float,
    style: Mapping[str, Any],
) -> None:
    table = pd.DataFrame(timeline).set_index("epoch_s") if timeline else pd.DataFrame()
    table.index = table.index - epoch_s
    if "replicas" in table:
        known = table["replicas"].dropna()
        panels["replicas"].step(known.index, known, where="post", **style)
    for key, line in (("verified", ":"), ("accepted", "-")):
        if key in table:
            # Exporters lag by a second or so: this is for the eye.
            known = table[key].dropna()
            rates = known.diff() / known.index.to_series().diff()
            style = {**style, "linestyle": line, "marker": "."}
            panels["drafts"].plot(rates.index, rates, **style)


def _make_panels(
    titles: Mapping[str, str], unit: str, columns: int = 3
) -> tuple[Figure, dict[str, Axes]]:
    lines = -(-len(titles) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns).flat
    for panel, title in zip(axes, titles.values(), strict=True):
        panel.set_title(title, fontsize=9)
        panel.set_xlabel(unit, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.25)
    return figure, dict(zip(titles, figure.axes, strict=True))


def _to_png(figure: Figure, caption: str) -> bytes:
    first = figure.axes[0]
    if first.get_legend_handles_labels()[0]:
        first.legend(fontsize=7)
    figure.supxlabel(caption, fontsize=8, color="#666666")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
