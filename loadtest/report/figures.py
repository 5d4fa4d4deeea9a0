"""Figures of a report, as PNG bytes. Each says on what it was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from loadtest.client.outcome import Outcome
from loadtest.client.records import Records
from loadtest.page import to_png

from .summary import Targets, delivery_times

Row = Mapping[str, Any]
Panels = dict[str, Any]
"""Axes by what they show."""

COLOURS = colormaps["tab20"]
"""Of arms, by number."""

_NUM_BINS = 60
_STYLE = {"style": ["-", "--", ":", "-."] * 3, "legend": False}
"""For roles, which may be more than there are colours."""

_AGAINST_LOAD = {
    "output_tokens_per_s": "output tokens/s",
    "goodput_per_s": "goodput, requests/s",
    "acceptance_length": "acceptance length",
    "ttft_p95_ms": "TTFT p95, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "itl_p99_ms": "ITL p99, ms",
}
_OVER_TIME = {
    "requests_in_flight": "requests in flight",
    "output_tokens_per_s": "output tokens/s",
    "ttft_p95_ms": "TTFT p95, ms",
    "requests_failed": "requests failed",
    "replicas": "replicas running",
    "accepted_draft_tokens_per_s": "accepted draft tokens/s",
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

    Whiskers span the rounds, crosses are runs that the client spoilt, dashed lines are
    targets.

    Returns:
        None if there are no two constant loads to join.
    """
    rows = sorted(
        (row for row in rows if row["level"] is not None), key=lambda row: row["level"]
    )
    if len({row["level"] for row in rows}) < 2:
        return None
    unit = "requests/s" if rows[0]["is_open"] else "requests in flight"
    figure, panels = make_panels(_AGAINST_LOAD, unit)
    for key, panel in panels.items():
        draw_by_level(panel, rows, key)
        panel.set_ylim(bottom=0)
        limit = {"ttft": targets.ttft_ms, "tpot": targets.tpot_ms}.get(key[:4])
        # One far above would flatten everything else.
        if limit is not None and limit < 3 * panel.get_ylim()[1]:
            panel.axhline(limit, color="gray", linestyle="--")
    return to_png(figure, caption)


def draw_by_level(panel: Any, rows: Sequence[Row], key: str) -> None:
    """Draw a line for each `arm` against `level`, with the range over rounds."""
    for number, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        own = [r for r in rows if r["arm"] == arm and r.get(key) is not None]
        if not own:
            continue
        found = pd.DataFrame([row[key] for row in own], dtype=float)
        middle, levels = found["median"], [row["level"] for row in own]
        spread = [middle - found["min"], found["max"] - middle]
        style = {"color": COLOURS(number % 20), "marker": ".", "label": arm}
        panel.errorbar(levels, middle, spread, **style)
        spoilt = [not row.get("is_valid", True) for row in own]
        panel.plot(np.array(levels)[spoilt], middle[spoilt], "rx")


def draw_timeline(
    records: Mapping[str, Records],
    runs: Mapping[str, Row],
    duration_s: float,
    caption: str = "",
) -> bytes | None:
    """Draw one round of a cell over time, by arm."""
    records = {arm: one for arm, one in records.items() if one.outcomes}
    if not records:
        return None
    figure, panels = make_panels(_OVER_TIME, "s")
    for number, (arm, one) in enumerate(records.items()):
        style = {"color": COLOURS(number % 20), "label": arm}
        _draw_clients(panels, one.outcomes, duration_s, style)
        seen = pd.DataFrame(runs[arm]["timeline"])
        seen = seen.reindex(columns=["epoch_s", "replicas", "accepted"]).astype(float)
        seen = seen.set_index(seen.pop("epoch_s") - (one.epoch_s or 0.0))
        replicas, accepted = seen["replicas"].dropna(), seen["accepted"].dropna()
        panels["replicas"].step(replicas.index, replicas, where="post", **style)
        # Exporters lag by a second or so: this is for the eye.
        rates = accepted.diff() / accepted.index.to_series().diff()
        panels["accepted_draft_tokens_per_s"].plot(rates, ".-", **style)
    for panel in panels.values():
        panel.set(xlim=(0, duration_s), ylim=(0, None))
    return to_png(figure, caption)


def draw_soak(samples: Sequence[Row], caption: str = "") -> bytes | None:
    """Draw memory, file descriptors and threads of every role over time."""
    if not samples:
        return None
    figure, panels = make_panels(_SOAK, "minutes")
    table = pd.DataFrame(samples)
    table["minutes"] = (table["epoch_s"] - table["epoch_s"].iloc[0]) / 60
    for key, panel in panels.items():
        table.pivot_table(key, "minutes", "role").plot(ax=panel, **_STYLE)
        panel.set_ylim(bottom=0)
    return to_png(figure, caption)


def _draw_clients(
    panels: Panels, outcomes: Sequence[Outcome], duration_s: float, style: Row
) -> None:
    edges = np.linspace(0, duration_s, _NUM_BINS + 1)
    sent_s, ended_s = np.array([(o.sent_s, o.end_s) for o in outcomes]).T
    at_s = edges[:, None]
    in_flight = ((sent_s <= at_s) & (at_s < ended_s)).sum(axis=1)
    panels["requests_in_flight"].step(edges, in_flight, **style)
    parts = [
        (time_s, outcome.output_tokens / max(1, outcome.num_deliveries))
        for outcome in outcomes
        for time_s in delivery_times(outcome)
    ]
    when, weights = np.reshape(parts, (-1, 2)).T
    tokens = np.histogram(when, edges, weights=weights)[0] / np.diff(edges)
    panels["output_tokens_per_s"].step(edges[1:], tokens, **style)
    due = pd.cut([o.scheduled_s for o in outcomes], edges, include_lowest=True)
    ttfts = pd.Series([o.ttft_ms for o in outcomes], dtype=float)
    late = ttfts.groupby(due, observed=False).quantile(0.95)
    panels["ttft_p95_ms"].plot(edges[1:], late.to_numpy(), marker=".", **style)
    failed = [o.end_s for o in outcomes if not o.is_ok]
    panels["requests_failed"].step(edges[1:], np.histogram(failed, edges)[0], **style)


def make_panels(titles: Mapping[str, str], unit: str) -> tuple[Figure, Panels]:
    """Return a figure with a panel for each title, three in a line, of a unit below."""
    lines = -(-len(titles) // 3)
    figure = Figure(figsize=(13.2, 3.1 * lines), layout="constrained")
    panels = dict(zip(titles, figure.subplots(lines, 3).flat, strict=True))
    for name, panel in panels.items():
        panel.set_title(titles[name], fontsize=9)
        panel.set_xlabel(unit, fontsize=8)
        panel.grid(alpha=0.25)
    return figure, panels
