"""Figures of a report, as PNG bytes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .outcome import Outcome
from .records import Records
from .summary import Targets, delivery_times, latencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

_COLOURS = ("#555555", "#1c7ed6", "#e8590c", "#c2255c", "#2f9e44", "#7048e8", "#0c8599")
_LINES = ("-", "--", ":", "-.")
"""One more of them each time that the colours are used up."""

_PANEL = (4.4, 3.1)
_DPI = 110
_NUM_BINS = 60
_FAR = 3.0

_AGAINST_LOAD = (
    ("TTFT p50, ms", "ttft_p50_ms", "ttft"),
    ("TTFT p95, ms", "ttft_p95_ms", "ttft"),
    ("TPOT p50, ms", "tpot_p50_ms", "tpot"),
    ("TPOT p95, ms", "tpot_p95_ms", "tpot"),
    ("ITL p99, ms", "itl_p99_ms", None),
    ("end to end p95, ms", "e2e_p95_ms", None),
    ("output tokens/s", "output_tokens_per_s", None),
    ("goodput, requests/s", "goodput_per_s", None),
    ("acceptance length", "acceptance_length", None),
)


def draw_against_load(rows: Sequence[Row], targets: Targets) -> bytes | None:
    """Draw figures against the level of constant loads, a line for each arm.

    Whiskers span the rounds, hollow marks are runs that the client spoilt, dashed
    lines are targets.

    Returns:
        None if there are no two constant loads to join.
    """
    rows = [row for row in rows if row["level"] is not None]
    if len({row["level"] for row in rows}) < 2:
        return None
    figure, panels = _panels(len(_AGAINST_LOAD))
    for panel, (title, key, target) in zip(panels, _AGAINST_LOAD, strict=True):
        for arm, style in styles_of(row["arm"] for row in rows):
            own = sorted(
                (r for r in rows if r["arm"] == arm and r.get(key) is not None),
                key=lambda row: row["level"],
            )
            if own:
                _draw_line(panel, arm, style, own, key)
        limit = {"ttft": targets.ttft_ms, "tpot": targets.tpot_ms, None: None}[target]
        if limit is not None:
            _draw_target(panel, limit)
        panel.set_xticks(sorted({row["level"] for row in rows}))
        unit = "requests/s" if rows[0]["is_open"] else "requests in flight"
        _label(panel, title, unit, "")
        panel.set_ylim(bottom=0)
    _add_legend(panels[0], 7)
    return _png(figure)


def draw_distributions(by_arm: Mapping[str, Sequence[Outcome]]) -> bytes | None:
    """Draw the distribution functions of one cell's latencies."""
    kinds = (
        ("TTFT, ms", "ttft"),
        ("inter-token latency, ms", "itl"),
        ("TPOT, ms", "tpot"),
        ("end to end, ms", "e2e"),
    )
    figure, panels = _panels(len(kinds), columns=4)
    has_drawn = False
    for panel, (title, name) in zip(panels, kinds, strict=True):
        for arm, style in styles_of(by_arm):
            values = np.sort(latencies(by_arm[arm])[name])
            if len(values):
                parts = np.arange(1, len(values) + 1) / len(values)
                panel.step(values, parts, label=arm, where="post", **style)
                has_drawn = True
        _label(panel, title, "", "share of requests" if panel is panels[0] else "")
        panel.set_ylim(0, 1)
    _add_legend(panels[0], 7)
    return _png(figure) if has_drawn else None


def draw_timeline(
    records: Mapping[str, Records],
    servers: Mapping[str, Sequence[Mapping[str, float]]],
    chaos: Mapping[str, Sequence[Mapping[str, Any]]],
    duration_s: float,
) -> bytes | None:
    """Draw one cell over time: in flight, tokens, latency, failures, replicas.

    Args:
        records: By arm, of one round.
        servers: What the server showed over time, by arm.
        chaos: What was done to the server, by arm; vertical lines.
        duration_s: Of sending.
    """
    arms = [arm for arm in records if records[arm].outcomes]
    if not arms:
        return None
    figure, panels = _panels(6)
    edges = np.linspace(0, duration_s, _NUM_BINS + 1)
    titles = (
        "requests in flight",
        "output tokens/s",
        "TTFT p95, ms",
        "requests failed",
        "replicas running",
        "verified and accepted draft tokens/s",
    )
    for arm, colours in styles_of(records):
        if arm not in arms:
            continue
        outcomes, epoch_s = records[arm].outcomes, records[arm].epoch_s or 0.0
        style: dict[str, Any] = {**colours, "linewidth": 1.3}
        panels[0].step(edges, _in_flight(outcomes, edges), label=arm, **style)
        panels[1].step(edges[1:], _tokens_per_s(outcomes, edges), **style)
        ttfts = _ttft(outcomes, edges)
        panels[2].plot(edges[1:], ttfts, marker=".", markersize=3, **style)
        failed = [o.end_s for o in outcomes if o.is_failed]
        panels[3].step(edges[1:], np.histogram(failed, edges)[0], **style)
        _draw_server(panels[4], panels[5], servers.get(arm, ()), epoch_s, style)
        for blow in chaos.get(arm, ()):
            if blow["epoch_s"] is None:
                continue
            for panel in panels:
                panel.axvline(blow["epoch_s"] - epoch_s, color="#e03131", linestyle=":")
    for panel, title in zip(panels, titles, strict=True):
        _label(panel, title, "s", "")
        panel.set_xlim(0, duration_s)
        panel.set_ylim(bottom=0)
    _add_legend(panels[0], 7)
    return _png(figure)


def draw_soak(samples: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Draw memory, file descriptors and threads of every role over time."""
    if not samples:
        return None
    figure, panels = _panels(3)
    begin_s = samples[0]["epoch_s"]
    kinds = (
        ("private memory, MiB", "memory_mib"),
        ("file descriptors", "num_fds"),
        ("threads", "num_threads"),
    )
    for panel, (title, key) in zip(panels, kinds, strict=True):
        for role, style in styles_of(sample["role"] for sample in samples):
            own = [sample for sample in samples if sample["role"] == role]
            times = [(sample["epoch_s"] - begin_s) / 60 for sample in own]
            panel.plot(times, [s[key] for s in own], label=role, **style)
        _label(panel, title, "minutes", "")
        panel.set_ylim(bottom=0)
    _add_legend(panels[0], 6)
    return _png(figure)


def _draw_line(
    panel: Axes, arm: str, style: Mapping[str, Any], own: Sequence[Row], key: str
) -> None:
    levels = [row["level"] for row in own]
    middle = np.array([row[key]["median"] for row in own])
    low = middle - [row[key]["min"] for row in own]
    high = np.array([row[key]["max"] for row in own]) - middle
    panel.errorbar(
        levels, middle, (low, high), label=arm, linewidth=1.4, capsize=2, **style
    )
    colour = style["color"]
    for row, value in zip(own, middle, strict=True):
        face = colour if row["is_valid"] else "white"
        panel.plot(row["level"], value, "o", color=colour, mfc=face, markersize=4)


def _draw_target(panel: Axes, limit: float) -> None:
    """Draw a target, or name it where it would flatten everything else."""
    if limit < _FAR * panel.get_ylim()[1]:
        panel.axhline(limit, color="#999999", linestyle="--", linewidth=1)
    else:
        panel.text(
            *(0.98, 0.96, f"target {limit:g}, far above"),
            transform=panel.transAxes,
            fontsize=7,
            color="#777777",
            ha="right",
            va="top",
        )


def _draw_server(
    replicas: Axes,
    tokens: Axes,
    timeline: Sequence[Mapping[str, float]],
    epoch_s: float,
    style: Mapping[str, Any],
) -> None:
    known = [p for p in timeline if "replicas" in p]
    replicas.step(
        [p["epoch_s"] - epoch_s for p in known],
        [p["replicas"] for p in known],
        where="post",
        **style,
    )
    for key, line in (("verified", ":"), ("accepted", "-")):
        points = [p for p in timeline if key in p]
        if len(points) > 1:
            times = np.array([p["epoch_s"] for p in points])
            rates = np.diff([p[key] for p in points]) / np.diff(times)
            # Exporters lag by a second or so: this is for the eye.
            tokens.plot(times[1:] - epoch_s, rates, **{**style, "linestyle": line})


def _in_flight(outcomes: Sequence[Outcome], edges: Any) -> Any:
    begins = np.sort([o.sent_s for o in outcomes])
    ends = np.sort([o.end_s for o in outcomes])
    return np.searchsorted(begins, edges, "right") - np.searchsorted(
        ends, edges, "right"
    )


def _tokens_per_s(outcomes: Sequence[Outcome], edges: Any) -> Any:
    times, weights = [], []
    for outcome in outcomes:
        own = delivery_times(outcome)
        times += own
        weights += [outcome.output_tokens / max(1, outcome.num_deliveries)] * len(own)
    return np.histogram(times, edges, weights=weights)[0] / np.diff(edges)


def _ttft(outcomes: Sequence[Outcome], edges: Any) -> list[float]:
    known = [(o.scheduled_s, o.ttft_ms) for o in outcomes if o.ttft_ms is not None]
    values = []
    for begin, end in itertools.pairwise(edges):
        own = [ttft for time, ttft in known if begin <= time < end]
        values.append(float(np.percentile(own, 95)) if own else float("nan"))
    return values


def styles_of(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every name once, in order, with the colour and line that tell it apart."""
    for number, name in enumerate(dict.fromkeys(names)):
        turn, place = divmod(number, len(_COLOURS))
        line = _LINES[turn % len(_LINES)]
        yield name, {"color": _COLOURS[place], "linestyle": line}


def _panels(count: int, columns: int = 3) -> tuple[Figure, list[Axes]]:
    lines = -(-count // columns)
    size = (_PANEL[0] * columns, _PANEL[1] * lines)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, n + 1) for n in range(count)]


def _add_legend(panel: Axes, size: int) -> None:
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=size)


def _label(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
