"""What any selector could reach on one replica.

Endless replies that draft the recorded blocks in turn, as many as were in flight, under
the costs of an engine model. Hindsight decides as `goodput` does, its calibration and
costs known beforehand; the clairvoyant knows what will be accepted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import kernel, state
from .drawn import Drawn
from .engine import Engine, load_engine
from .fleet import ROUTERS, make_fleet
from .recorded import read_drafts

DEPTH = 8
"""Of the drafts that are played."""

_MODEL = "cpu-demo-100m"
_RUN_S = 100.0
_ENDLESS = 10**9
_LEAST_GAIN = 1e-4
"""Of the price of time, by which it is known."""


def find_bounds(path: Path, num_reqs: int) -> dict[str, float]:
    """Return tokens a second of `none`, each `fixed` length, and of those who know.

    Args:
        path: Of a trace whose drafts are `DEPTH` long.
        num_reqs: In flight.
    """
    found, drafts = {}, read_drafts(path)
    for depth in range(DEPTH + 1):
        engine = load_engine(_MODEL, depth, num_reqs, state.ALL, drafts)
        found[f"fixed:{depth}" if depth else "none"] = play(engine)
    engine = load_engine(_MODEL, DEPTH, num_reqs, state.WORTH, drafts)
    found["hindsight"] = play(engine)
    outcomes = read_drafts(path, knows_outcomes=True)
    engine = load_engine(_MODEL, DEPTH, num_reqs, state.FORESEEN, outcomes)
    # The best ratio is found by pricing time at it (Dinkelbach).
    speed, before = max(found.values()), 0.0
    while speed > (1 + _LEAST_GAIN) * before:
        before, speed = speed, play(engine, speed / 1e3)
    return found | {"clairvoyant": speed}


def play(engine: Engine, tokens_per_ms: float = 0.0) -> float:
    """Return tokens a second of one replica whose batch is always full.

    Args:
        engine: At its batch size.
        tokens_per_ms: What time is worth, where no plan says it.
    """
    size = engine.costs.max_num_seqs
    ones = np.ones(size, np.int64)
    drawn = Drawn(np.zeros(size), ones, _ENDLESS * ones, 0 * ones)
    fleet = make_fleet(engine, drawn, 1, 0)
    fleet.plan[:, 1] = tokens_per_ms
    kernel.advance(fleet, ROUTERS["round-robin"], 0.0, size, _RUN_S)
    return float((_ENDLESS - fleet.slots.output).sum() / _RUN_S)
