"""Arms on the same requests, with intervals over seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from loadtest.interrupts import stop_if_asked
from loadtest.progress import Progress

from .autoscale import PERIOD_S, Growth, make_scaler, run_growing
from .drawn import Drawn
from .engine import Engine
from .fleet import Metrics, Targets, latencies, measure, run_fleet
from .load import Load, draw_requests

_CONFIDENCE = 0.95

LEVELS = tuple(np.linspace(0.0, 1.0, 101).round(2))
"""Of the quantiles that are kept of each run."""

_MOST_TIMES = 240
"""Points of replicas over time that are kept."""

_LATENCIES = ("ttft_ms", "tpot_ms")

Curves = dict[str, list[float]]

Interval = dict[str, float | None]
"""An estimate over seeds as `value`, the mean, of ratios the geometric one; and the
ends `low` and `high` of its 95 % t-interval, None where there is one seed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared."""

    engine: Engine  # of every replica
    load: Load  # what arrives
    num_replicas: int  # in the fleet, at most where it grows and shrinks
    num_requests: int  # of each seed
    rate_per_s: float  # of arrivals on average
    staleness_s: float  # age of what routers know
    targets: Targets  # of goodput
    arms: Sequence[str]  # routers, or autoscalers as `NAME:TARGET`, the base first
    seeds: Sequence[int]  # one run of each arm for each
    # Share of slow replicas, and how many times longer their steps take.
    slow: tuple[float, float] = (0.0, 1.0)
    growth: Growth | None = None  # of the fleet, under autoscalers


def compare(plan: Plan, progress: Progress) -> dict[str, dict[str, Any]]:
    """Run all arms on the requests of each seed, in turn.

    Args:
        plan: What is compared.
        progress: Told of the pieces of each run; it expects them already.

    Returns:
        By arm, as JSON holds it: `runs`, the metrics of each seed; `means`, intervals
        over seeds, by metric; `ratios` over the first arm, paired by seed, none for the
        first; `curves`, `ttft_ms` and `tpot_ms` at `LEVELS`, means over seeds, and
        under autoscalers `replicas` of the first seed at `time_s`.
    """
    runs: dict[str, list[Metrics]] = {arm: [] for arm in plan.arms}
    curves: dict[str, list[Curves]] = {arm: [] for arm in plan.arms}
    progress.show("loading machine code, which takes half a minute the first time")
    _compile(plan)
    stop_if_asked()
    for seed in plan.seeds:
        drawn = draw_requests(plan.load, plan.num_requests, plan.rate_per_s, seed)
        for arm in plan.arms:
            metrics, found = _run(plan, arm, drawn, seed, make_ticker(progress, arm))
            runs[arm].append(metrics)
            curves[arm].append(found)
    first = runs[plan.arms[0]]
    return {
        arm: {
            "runs": own,
            "means": {name: _estimate([run[name] for run in own]) for name in own[0]},
            "ratios": _ratios(own, first) if own is not first else {},
            "curves": curves[arm][0]
            | {
                name: np.mean([one[name] for one in curves[arm]], axis=0).tolist()
                for name in _LATENCIES
            },
        }
        for arm, own in runs.items()
    }


def expect(pieces: Mapping[str, int]) -> Progress:
    """Return the progress of so many pieces of runs of each arm."""
    progress = Progress(sum(pieces.values()))
    for arm, count in pieces.items():
        progress.expect(arm, count)
    return progress


def make_ticker(progress: Progress, arm: str) -> Callable[[], None]:
    """Return what is called after each piece of a run that begins now."""
    ticks = [time.perf_counter()]

    def advance() -> None:
        stop_if_asked()
        ticks.append(time.perf_counter())
        progress.advance(arm, ticks[-1] - ticks[-2], arm)

    return advance


def _run(
    plan: Plan, arm: str, drawn: Drawn, seed: int, advance: Callable[[], None]
) -> tuple[Metrics, Curves]:
    scaler, _, target = arm.partition(":")
    sizes: Curves = {}
    if target:
        decide = make_scaler(scaler, float(target), plan.engine, plan.load.hard_before)
        metrics, requests, paid = run_growing(
            *(plan.engine, drawn, decide, plan.growth or Growth(plan.num_replicas)),
            *(plan.targets, seed, advance),
        )
        kept = slice(None, None, -(-len(paid) // _MOST_TIMES))
        sizes["time_s"] = [PERIOD_S * (1 + place) for place in range(len(paid))[kept]]
        sizes["replicas"] = [float(count) for count in paid[kept]]
    else:
        requests = run_fleet(
            *(plan.engine, drawn, plan.num_replicas, arm),
            *(plan.staleness_s, seed, plan.slow, advance),
        ).requests
        metrics = measure(requests, plan.targets)
    pairs = zip(_LATENCIES, latencies(requests), strict=True)
    return metrics, {
        name: np.quantile(values, LEVELS).tolist() for name, values in pairs
    } | sizes


def _compile(plan: Plan) -> None:
    """Load the machine code, which takes seconds once: no part of any arm's time."""
    drawn = draw_requests(plan.load, 1, plan.rate_per_s, 0)
    run_fleet(plan.engine, drawn, 1, "round-robin", 0.0, 0)


def _ratios(own: Sequence[Metrics], first: Sequence[Metrics]) -> dict[str, Interval]:
    """Compare seed by seed; a metric that is 0 somewhere has no ratio."""
    found = {}
    for name in own[0]:
        pairs = np.array([[a[name], b[name]] for a, b in zip(own, first, strict=True)])
        if (pairs > 0).all():
            logs = _estimate(list(np.log(pairs[:, 0] / pairs[:, 1])))
            found[name] = {
                end: None if log is None else float(np.exp(log))
                for end, log in logs.items()
            }
    return found


def _estimate(samples: Sequence[float]) -> Interval:
    """Return the mean with its t-interval."""
    mean = float(np.mean(samples))
    if len(samples) < 2:
        return {"value": mean, "low": None, "high": None}
    half = find_half_width(samples)
    return {"value": mean, "low": mean - half, "high": mean + half}


def find_half_width(samples: Sequence[float]) -> float:
    """Return that of the 95 % t-interval of a mean, of two samples or more."""
    quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, len(samples) - 1)
    return float(quantile * stats.sem(samples))
