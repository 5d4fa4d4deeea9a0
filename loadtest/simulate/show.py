"""The committed comparisons: `python -m loadtest.simulate.show routers`, for one.

Each writes its JSON into `loadtest/results/simulate`, and its tables into the README
there.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from loadtest.page import to_table

from .autoscale import SCALERS
from .bounds import find_bounds
from .compare import Plan, compare, expect, make_ticker
from .crowd import render_crowd, run_crowd
from .engine import load_engine
from .fleet import PIECES, ROUTERS, Targets, find_speed, measure, run_fleet
from .growth import draw_growth, render_growth, run_growth
from .load import Load, draw_requests, parse_arrivals, read_load
from .output import FOLDER, join_parts, write_json
from .planned import make_planners
from .recorded import read_folder
from .state import ASKED, STEPS, WORTH
from .storm import render_storm, run_storm
from .traces import write_azure

_REQUESTS: Final = {
    1: {0.1: 20_000, 1.0: 20_000, 10.0: 20_000},
    8: {0.1: 50_000, 1.0: 50_000, 10.0: 60_000},
    64: {0.1: 100_000, 1.0: 100_000, 10.0: 450_000},
    1000: {0.1: 300_000, 1.0: 1_000_000},
}
"""By replicas and age of telemetry, s: it must be known before requests are measured.

A thousand replicas and 10 s would take seven million.
"""

_SLOW: Final = {
    "all replicas alike": (0.0, 1.0),
    "a quarter takes twice as long": (0.25, 2.0),
}
_UTILISATION: Final = 0.8
_SEEDS: Final = 3

_SHIFT: Final = (0.2, 0.8)
"""Share of hard requests before the middle of the day, and after it."""

BOUNDS: Final = ("hindsight", "clairvoyant")

_DRAFTS: Final = FOLDER.parent / "ablations" / "drafts"
_SHORTCUT: Final = (
    ("h100-qwen3-1.7b", "recorded", 0.8, 4.0),
    ("h100-qwen3-1.7b", "recorded", 1.2, 4.0),
    ("h100-qwen3-1.7b", "by chance", 0.8, 4.0),
    ("cpu-demo-100m", "recorded", 0.8, 40.0),
)
"""Engine, what it drafts, utilisation, and the longest time of a token, ms."""

_SHORTCUT_METRICS: Final = {
    "ttft_p50_ms": "TTFT p50, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "duration_s": "all done, s",
}

_TPOT_MS: Final = 4.0
_TARGETS_OF_BURSTS: Final = {
    "target-ongoing": (8, 16, 24, 32),
    "latency": (1.4, 1.8, 2.2, 2.8),
    "ours": (1.4, 1.8, 2.2, 2.8),
}
_TRACE_REQUESTS: Final = 200_000
_TARGETS: Final = {
    "target-ongoing": (32, 40, 48, 56),
    "latency": (2.2, 2.8, 4.0),
    "ours": (2.2, 2.8, 4.0),
}


def run_routers() -> list[dict[str, Any]]:
    """Run every cell, with progress on standard error."""
    cells = [
        (fleet, count, age_s)
        for fleet, count in itertools.product(_SLOW, _REQUESTS)
        for age_s in _REQUESTS[count]
    ]
    progress = expect(dict.fromkeys(ROUTERS, len(cells) * _SEEDS * PIECES))
    engine, load, rows = load_engine("h100-qwen3-1.7b", 3), Load(), []
    for fleet, count, age_s in cells:
        speed = find_speed(count, _SLOW[fleet])
        plan = Plan(
            engine=engine,
            load=load,
            num_replicas=count,
            num_requests=_REQUESTS[count][age_s],
            rate_per_s=_UTILISATION * speed * engine.capacity_per_s(load),
            staleness_s=age_s,
            targets=Targets(ttft_ms=100, tpot_ms=5),
            arms=list(ROUTERS),
            seeds=range(_SEEDS),
            slow=_SLOW[fleet],
        )
        found = compare(plan, progress)
        arms = {arm: one["means"] for arm, one in found.items()}
        row = {"fleet": fleet, "num_replicas": count, "age_s": age_s}
        rows.append(row | {"rate_per_s": plan.rate_per_s, "arms": arms})
    return rows


def render_routers(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables: goodput over the rate of arrivals, in per cent."""
    parts = []
    for fleet in _SLOW:
        rows = [["replicas", "telemetry, s old", *ROUTERS]]
        for cell in cells:
            if cell["fleet"] != fleet:
                continue
            row = [f"{cell['num_replicas']:,}", f"{cell['age_s']:g}"]
            for router in ROUTERS:
                good = cell["arms"][router]["attainment"]
                half = 100 * (good["high"] - good["low"]) / 2
                row.append(f"{100 * good['value']:.1f} ± {half:.1f}")
            rows.append(row)
        parts += [f"{fleet[0].upper()}{fleet[1:]}:", to_table(rows)]
    return join_parts(*parts)


def run_scaling() -> list[dict[str, Any]]:
    """Run every autoscaler at every target on a day of 22 minutes, shifting in mid-run.

    A day this short is 65 times too fast; start-up takes 60 s of it all the same.
    """
    before, after = _SHIFT
    load = Load(parse_arrivals("diurnal=4"), hard_before=before, hard_after=after)
    return _scale(load, _TARGETS)


def run_trace_scaling() -> list[dict[str, Any]]:
    """Do so on a trace in the form of Azure's, made up, with bursts of minutes."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "made-up.csv"
        write_azure(trace, _TRACE_REQUESTS)
        return _scale(read_load(trace, *_SHIFT), _TARGETS_OF_BURSTS)


def _scale(load: Load, targets: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    engine = load_engine("h100-qwen3-1.7b", 3)
    arms = [f"{name}:{target}" for name in SCALERS for target in targets[name]]
    plan = Plan(
        engine=engine,
        load=load,
        num_replicas=12,
        num_requests=_TRACE_REQUESTS if load.trace else 400_000,
        # Bursts take twice of it and more.
        rate_per_s=(2.0 if load.trace else 3.5) * engine.capacity_per_s(load),
        staleness_s=0.25,
        targets=Targets(ttft_ms=100, tpot_ms=_TPOT_MS),
        arms=arms,
        seeds=range(_SEEDS),
    )
    found = compare(plan, expect(dict.fromkeys(arms, _SEEDS * PIECES)))
    return [
        {"scaler": scaler, "target": float(target), "runs": found[arm]["runs"]}
        for arm in arms
        for scaler, target in [arm.split(":")]
    ]


def render_scaling(
    rows: Sequence[Mapping[str, Any]], levels: Sequence[float] = (0.95, 0.98, 0.99)
) -> str:
    """Return attainment and cost by target, and the least cost of an attainment."""
    runs = [["autoscaler", "target", "attainment, %", "replica-hours"]]
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in SCALERS}
    for row in rows:
        good, hours = (
            float(np.mean([run[name] for run in row["runs"]]))
            for name in ("attainment", "replica_hours")
        )
        points[row["scaler"]].append((good, hours))
        cells = f"{row['target']:g}", f"{100 * good:.2f}", f"{hours:.2f}"
        runs.append([row["scaler"], *cells])
    least = [["replica-hours", *(f"{100 * level:g} % or more" for level in levels)]]
    for name, found in points.items():
        by_cost = sorted(found, key=itemgetter(1))
        cheapest = [
            next((f"{c:.2f}" for good, c in by_cost if good >= level), "-")
            for level in levels
        ]
        least.append([name, *cheapest])
    return join_parts(to_table(runs), to_table(least))


def run_bounds() -> list[dict[str, Any]]:
    """Find the bounds of every recorded trace, over the best fixed length there."""
    rows: list[dict[str, Any]] = json.loads(
        (FOLDER / "bounds-replay.json").read_text("utf-8")
    )
    tick = make_ticker(expect({"bounds": len(rows)}), "bounds")
    for row in rows:
        path = _DRAFTS / row["list"] / row["cell"] / "fixed-8.npz"
        found = find_bounds(path, int(row["cell"].rpartition("-c")[2]))
        best = max(v for name, v in found.items() if name.startswith("fixed"))
        row["replayed"] = {name: row[name] for name in BOUNDS}
        row |= {name: found[name] / best for name in BOUNDS}
        tick()
    return rows


def render_bounds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return means over the lists of requests, and how far two ways of it differ."""
    heads = [f"{name}{by}" for name in BOUNDS for by in ("", ", replayed")]
    lines = [["cell", *heads, "largest difference"]]
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        values = np.array(
            [[(row[name], row["replayed"][name]) for name in BOUNDS] for row in own]
        )
        cells = [f"{value:.3f}" for value in values.mean(axis=0).ravel()]
        most = np.abs(values[..., 0] / values[..., 1] - 1.0).max()
        lines.append([cell, *cells, f"{100 * most:.1f} %"])
    return join_parts(to_table(lines))


def run_shortcut() -> list[dict[str, Any]]:
    """Run the compiled decisions and the planner itself on the same requests."""
    load, recorded, rows = Load(), read_folder(_DRAFTS), []
    arms = {"short cut": WORTH, "planner": ASKED}
    progress = expect(dict.fromkeys(arms, PIECES * len(_SHORTCUT)))
    for model, drafts, utilisation, tpot_ms in _SHORTCUT:
        own = recorded if drafts == "recorded" else None
        usual = load_engine(model, 3, recorded=own)
        rate_per_s = utilisation * 64 * usual.capacity_per_s(load)
        drawn = draw_requests(load, 50_000, rate_per_s, 0)
        row = {"model": model, "drafts": drafts, "utilisation": utilisation}
        for arm, rule in arms.items():
            engine = load_engine(model, 8, None, rule, own)
            fleet = run_fleet(
                *(engine, drawn, 64, "power-of-two-sent", 0.1, 0),
                on_piece=make_ticker(progress, arm),
                decide=make_planners(engine, 64),
            )
            row[arm] = measure(fleet.requests, Targets(25 * tpot_ms, tpot_ms)) | {
                "duration_s": float(fleet.requests.finish_s.max()),
                "steps": float(fleet.counts[STEPS]),
            }
        rows.append(row)
    return rows


def render_shortcut(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the short cut says, and by how much it is off."""
    heads = ["engine, drafts", "utilisation", "attainment, %"]
    lines = [[*heads, *_SHORTCUT_METRICS.values()]]
    for row in rows:
        quick, whole = row["short cut"], row["planner"]
        shares = (f"{100 * one['attainment']:.2f}" for one in (quick, whole))
        cells = [f"{row['model']}, {row['drafts']}", f"{row['utilisation']:g}"]
        cells.append(" for ".join(shares))
        for name in _SHORTCUT_METRICS:
            off = 100 * (quick[name] / whole[name] - 1)
            cells.append(f"{quick[name]:.4g} ({off:+.1f} %)")
        lines.append(cells)
    return join_parts(to_table(lines))


SHOWN: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], str]]]] = {
    "routers": (run_routers, render_routers),
    "scaling": (run_scaling, render_scaling),
    "trace-scaling": (
        run_trace_scaling,
        functools.partial(render_scaling, levels=(0.8, 0.9, 0.95)),
    ),
    "bounds": (run_bounds, render_bounds),
    "shortcut": (run_shortcut, render_shortcut),
    "growth": (run_growth, render_growth),
    "crowd": (run_crowd, render_crowd),
    "storm": (run_storm, render_storm),
}
"""By name: what runs it, and what renders it."""


def marks(name: str) -> tuple[str, str]:
    """Return what stands before and behind a table in the README."""
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"


def main(names: Sequence[str]) -> int:
    """Run, write and render what is named."""
    for name in names:
        run, render = SHOWN[name]
        found = run()
        write_json(FOLDER / f"{name}.json", found)
        if name == "growth":
            draw_growth(found, FOLDER / "growth.png")
        readme, (begin, end) = FOLDER / "README.md", marks(name)
        before, _, rest = readme.read_text("utf-8").partition(begin)
        after = rest.partition(end)[2]
        readme.write_text(before + begin + render(found) + end + after, "utf-8")
        sys.stderr.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SHOWN)))
