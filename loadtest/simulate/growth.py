"""How the time of a run grows with replicas and requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from loadtest.page import to_png

from .compare import expect, make_ticker
from .engine import load_engine
from .fleet import PIECES, run_fleet
from .load import Load, draw_requests
from .output import join_parts
from .page import make_panels
from .state import ALL, REQUEST_STEPS, STEPS, WORTH

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
    load, rows = Load(), []
    cells = list(product(ARMS, _REQUESTS, _REPLICAS))
    kinds = [f"{arm}, {count}" for arm, count, _ in cells]
    progress = expect({kind: PIECES * kinds.count(kind) for kind in kinds})
    for kind, (arm, count, replicas) in zip(kinds, cells, strict=True):
        router, num_drafts, rule = ARMS[arm]
        engine = load_engine("h100-qwen3-1.7b", num_drafts, rule=rule)
        rate_per_s = _UTILISATION * replicas * engine.capacity_per_s(load)
        drawn = draw_requests(load, count, rate_per_s, 0)
        run_fleet(engine, draw_requests(load, 10, rate_per_s, 0), 1, router, 0.1, 0)
        began_s, ticker = time.process_time(), make_ticker(progress, kind)
        run = run_fleet(engine, drawn, replicas, router, 0.1, 0, on_piece=ticker)
        row = {"arm": arm, "num_replicas": replicas, "num_requests": count}
        row["cpu_s"] = round(time.process_time() - began_s, 3)
        row["num_steps"] = int(run.counts[STEPS])
        row["num_request_steps"] = int(run.counts[REQUEST_STEPS])
        rows.append(row)
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
    return join_parts("\n".join(lines), "![Run time](growth.png)")


def draw_growth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time against replicas, a line for each number of requests."""
    figure, panels = make_panels(len(ARMS))
    panels[1].sharey(panels[0])
    for panel, arm in zip(panels, ARMS, strict=True):
        for count in _REQUESTS:
            own = [r for r in rows if (r["arm"], r["num_requests"]) == (arm, count)]
            replicas, seconds = (
                [row[name] for row in own] for name in ("num_replicas", "cpu_s")
            )
            panel.loglog(replicas, seconds, marker="o", label=f"{count:,}")
        panel.set(title=arm, xlabel="replicas", ylabel="processor time, s")
    caption = (
        "h100-qwen3-1.7b, 300 prompt and 200 reply tokens on average, "
        f"{_UTILISATION:.0%} utilisation; lines are numbers of requests; one run each"
    )
    path.write_bytes(to_png(figure, caption))
