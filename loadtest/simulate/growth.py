"""How the time of a run grows with replicas and requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.page import to_png
from loadtest.progress import Progress

from .compare import make_ticker
from .engine import find_model, load_engine
from .fleet import PIECES, run_fleet
from .load import Lengths, Load, draw_requests, parse_arrivals
from .state import ALL, WORTH

ARMS: Final = {
    "power-of-two, all drafts": ("power-of-two", 3, ALL),
    "ours, drafts by --select": ("ours", 8, WORTH),
}
"""Router, drafts of a request in a step, and which are verified, by name."""

_REPLICAS: Final = (1, 8, 64, 1000)
_REQUESTS: Final = (10_000, 100_000, 1_000_000)
_UTILISATION: Final = 0.8


def run_growth() -> list[dict[str, Any]]:
    """Time each arm, processor seconds of this process, compiled before."""
    load = Load(parse_arrivals("poisson"), Lengths(300, 1), Lengths(200, 1), 0.5, 0.5)
    cells = list(product(ARMS, _REQUESTS, _REPLICAS))
    progress, rows = Progress(PIECES * len(cells)), []
    for arm, count, _ in cells:
        progress.expect(f"{arm}, {count}", PIECES)
    for arm, count, replicas in cells:
        router, num_drafts, rule = ARMS[arm]
        engine = load_engine(find_model("h100-qwen3-1.7b"), num_drafts, rule=rule)
        rate_per_s = _UTILISATION * replicas * engine.capacity_per_s(load)
        fixed = engine, draw_requests(load, count, rate_per_s, 0)
        run_fleet(engine, draw_requests(load, 10, rate_per_s, 0), 1, router, 0.1, 0)
        began_s = time.process_time()
        ticker = make_ticker(progress, f"{arm}, {count}")
        run = run_fleet(*fixed, replicas, router, 0.1, 0, on_piece=ticker)
        row = {"arm": arm, "num_replicas": replicas, "num_requests": count}
        row["cpu_s"] = round(time.process_time() - began_s, 3)
        row["num_steps"] = run.num_steps
        rows.append(row | {"num_request_steps": run.num_request_steps})
    return rows


def render_growth(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return by how much time grows with either, and that of the largest run."""
    found = {
        (row["arm"], row["num_requests"], row["num_replicas"]): row["cpu_s"]
        for row in rows
    }
    requests, replicas, lines = _REQUESTS[-1], _REPLICAS[-1], []
    for arm in ARMS:
        most_s = found[arm, requests, replicas]
        lines.append(
            f"- {arm}: {requests:,} requests at {replicas:,} replicas take "
            f"{most_s:.3g} s, {most_s / found[arm, requests, 1]:.2g} times as long as "
            f"at one replica, and {most_s / found[arm, _REQUESTS[-2], replicas]:.2g} "
            f"times as long as {_REQUESTS[-2]:,} requests."
        )
    return "\n".join(["", *lines, "", "![Run time](growth.png)", "", ""])


def draw_growth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time against replicas, a line for each number of requests."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ARMS), sharey=True)
    for panel, arm in zip(panels, ARMS, strict=True):
        for place, count in enumerate(_REQUESTS):
            own = [r for r in rows if (r["arm"], r["num_requests"]) == (arm, count)]
            replicas, seconds = (
                [row[name] for row in own] for name in ("num_replicas", "cpu_s")
            )
            colour = colormaps["tab10"](place)
            panel.loglog(replicas, seconds, "o-", color=colour, label=f"{count:,}")
        panel.set(title=arm, xlabel="replicas", ylabel="processor time, s")
        panel.grid(alpha=0.25)
    caption = (
        "h100-qwen3-1.7b, 300 prompt and 200 reply tokens on average, "
        f"{_UTILISATION:.0%} utilisation; lines are numbers of requests; one run each"
    )
    path.write_bytes(to_png(figure, caption))
