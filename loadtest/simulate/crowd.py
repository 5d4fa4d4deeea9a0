"""Two callers of whom one floods, and deadlines at twice what a fleet can do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from loadtest.page import to_table

from .compare import expect, make_ticker
from .drawn import Drawn
from .engine import Engine, load_engine
from .front import SERVED, TOO_LATE, Front
from .load import Load, draw_requests
from .output import join_parts
from .state import Ints

_MODEL, _DRAFTS, _BATCH, _REPLICAS, _QUEUED = "h100-qwen3-1.7b", 3, 32, 4, 64
_LOAD: Final = Load()
_QUIET, _FLOOD, _TWICE = 0.2, 1.8, 2.0
"""Over what the fleet can do: the quiet caller, the other, and one with deadlines."""

_DEADLINES_MS: Final = (600.0, 1000.0, 1500.0)
_SERVED: Final = ", requests served"
_SEEDS, _REQUESTS, _REPLAYED = 3, 6000, 40


def draw(parts: Sequence[tuple[float, int]], seed: int) -> tuple[Drawn, Ints]:
    """Return the requests of several callers by arrival, and whose each is.

    Args:
        parts: Of each caller, requests a second and how many.
        seed: Of all of them.
    """
    drawn = [
        draw_requests(_LOAD, count, rate_per_s, 100 * seed + number)
        for number, (rate_per_s, count) in enumerate(parts)
    ]
    whose = np.repeat(np.arange(len(parts)), [count for _, count in parts])
    names = ("arrival_s", "num_prompt_tokens", "num_output_tokens", "kind")
    joined = [np.concatenate([getattr(one, name) for one in drawn]) for name in names]
    order = np.argsort(joined[0], kind="stable")
    return Drawn(*(values[order] for values in joined)), whose[order]


def compare_callers(engine: Engine, seed: int) -> dict[str, float]:
    """Return the quiet caller's p95 of times to first tokens, ms: alone and beside.

    And how many requests of both were served.
    """
    rate_per_s = engine.capacity_per_s(_LOAD) * _REPLICAS
    num_quiet = round(_REQUESTS * _QUIET / (_QUIET + _FLOOD))
    quiet = _QUIET * rate_per_s, num_quiet
    both = [quiet, (_FLOOD * rate_per_s, _REQUESTS - num_quiet)]
    found = {}
    for name, parts, is_fair, keeps_seats in (
        ("alone", [quiet], True, True),
        ("fair turns and kept seats", both, True, True),
        ("fair turns", both, True, False),
        ("first come, first served", both, False, False),
    ):
        drawn, whose = draw(parts, seed)
        callers = dict.fromkeys(("quiet", "flood")[: len(parts)], math.inf)
        served = Front(
            *(engine, drawn, callers, whose, _REPLICAS),
            max_queued=_QUEUED,
            is_fair=is_fair,
            keeps_seats=keeps_seats,
            seed=seed,
        ).run()
        found[name] = float(np.nanquantile(served.ttft_ms[whose == 0], 0.95))
        found[f"{name}{_SERVED}"] = float((served.outcome == SERVED).sum())
    return found


def compare_deadlines(
    engine: Engine, deadline_ms: float, seed: int
) -> dict[str, float]:
    """Return what becomes of requests with a deadline, refused early and not.

    `precision` is the share of those refused that would have missed it: some of them
    are let in, each in a run of its own.
    """
    rate_per_s = engine.capacity_per_s(_LOAD) * _REPLICAS
    drawn, whose = draw([(_TWICE * rate_per_s, _REQUESTS)], seed)
    fixed = engine, drawn, {"all": deadline_ms}, whose, _REPLICAS
    span_s = drawn.arrival_s[-1]
    found = {}
    for name, refuses in (("refused early", True), ("not refused", False)):
        front = Front(*fixed, max_queued=_QUEUED, refuses=refuses, seed=seed)
        served = front.run()
        is_in_time = served.finish_ms <= deadline_ms
        found[f"{name}, in time a second"] = float(is_in_time.sum() / span_s)
        taken = served.outcome == SERVED
        found[f"{name}, of those served in time"] = float(is_in_time[taken].mean())
        if refuses:
            late = np.flatnonzero(served.outcome == TOO_LATE)
            found["refused"] = float(late.size / whose.size)
    some = np.random.default_rng(seed).permutation(late)[:_REPLAYED]
    missed = 0
    for number in some.tolist():
        front = Front(*fixed, max_queued=_QUEUED, never_refused=number, seed=seed)
        missed += not front.run().finish_ms[number] <= deadline_ms
    found["precision"] = missed / max(1, some.size)
    return found


def run_crowd() -> dict[str, list[dict[str, float]]]:
    """Compute both for every seed."""
    engine = load_engine(_MODEL, _DRAFTS, _BATCH)
    names = ["callers", *(f"{deadline_ms:g}" for deadline_ms in _DEADLINES_MS)]
    progress = expect(dict.fromkeys(names, _SEEDS))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(_SEEDS):
        for name, found in rows.items():
            tick = make_ticker(progress, name)
            if name == "callers":
                found.append(compare_callers(engine, seed))
            else:
                found.append(compare_deadlines(engine, float(name), seed))
            tick()
    return rows


def render_crowd(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Render two tables: the quiet caller, and requests with deadlines."""
    means = {
        name: {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
        for name, runs in rows.items()
    }
    callers = means.pop("callers")
    quiet = [["the quiet caller", "p95 of times to first token, ms", "times alone"]]
    quiet[0].append("requests served, of both")
    for name, value in callers.items():
        if not name.endswith(_SERVED):
            cells = f"{value:,.0f}", f"{value / callers['alone']:.1f}"
            quiet.append([name, *cells, f"{callers[name + _SERVED]:,.0f}"])
    columns = {
        "refused early, %": ("refused", 100),
        "of those served in time, %": ("refused early, of those served in time", 100),
        "in time a second": ("refused early, in time a second", 1),
        "would have missed, % of refused": ("precision", 100),
        "in time a second, none refused": ("not refused, in time a second", 1),
    }
    deadlines = [["deadline, ms", *columns]]
    for deadline_ms, row in means.items():
        found = (f"{times * row[name]:.0f}" for name, times in columns.values())
        deadlines.append([f"{float(deadline_ms):,.0f}", *found])
    return join_parts(to_table(quiet), to_table(deadlines))
