"""What each part of the goodput planner is worth: replays with it and without it.

Run with `python -m loadtest.replay.ablations --traces DIR... --output DIR`. Every
folder holds `CELL/fixed-8.npz` as the engine bench leaves it: drafts all verified.
They are played again at prices fitted to measured step times, which drift, under a
clock that errs, by the planner as it is and by one without a part. Tokens are counted
by the exact prices, so that noise acts through decisions alone. What planning takes is
not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
from scipy import stats

from loadtest.environment import describe_machine, describe_piece, describe_versions
from policies import depth_control, exploration, goodput
from policies.estimators import cost_filter, cost_table, draft_acceptance
from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.draft_acceptance import DraftAcceptance
from policies.estimators.request_effects import RequestEffects
from policies.exploration import DrafterBacklog, Exploration
from policies.goodput import GoodputPlanner
from policies.types import CostProfile

from .ablation_scenarios import (
    CELLS,
    DEPTH,
    LENDER,
    MEASUREMENTS,
    ErringClock,
    Stretch,
    fit_measured,
    list_scenarios,
)
from .hindsight import engine_limits
from .prices import StepPrices
from .replay import play_planner
from .traces import Array, load_traces

NEVER = 10**9
NOTHING, OVERALL = "nothing", "overall"

Row = dict[str, Any]


class NoEffects(RequestEffects):
    """Takes all requests for alike."""

    def assign_slots(self, req_ids: Any, is_observed: Any) -> Any:  # noqa: ARG002 - overridden
        """Return the place of the unknown, whose effect is 0 anew."""
        self.gradient[:] = self.information[:] = self.effect[:] = 0.0
        return np.zeros(len(req_ids), dtype=np.int64)

    def log_odds(self, req_ids: Any) -> Array:
        """Return 0 for all."""
        return np.zeros(len(req_ids))


class RawConfidence(ConfidenceCalibration):
    """Takes the drafter at its word."""

    def observe(self, *outcomes: Any, **others: Any) -> None:
        """Count errors, and learn nothing."""
        slope = self._slope
        super().observe(*outcomes, **others)
        self._intercept[:], self._slope = 0.0, slope


class NoExploring(Exploration):
    """Never drafts against the plan."""

    def adjust_depth(self, depth: int, max_depth: int) -> int:  # noqa: ARG002 - overridden
        """Return the planned depth."""
        return depth


class ConstantInterval(Exploration):
    """Explores as often whatever it costs."""

    def set_cost(self, *_: Any, **__: Any) -> None:
        """Keep the interval."""


class AllRows(Exploration):
    """Has all requests verify a draft in an exploring step."""

    def pick_rows(self, num_reqs: int) -> Any:
        """Return all rows."""
        return np.arange(num_reqs)


class NoBacklog(DrafterBacklog):
    """Takes catching up for free."""

    def share_ms(self, cost: Any) -> float:  # noqa: ARG002 - overridden
        """Return 0."""
        return 0.0


def _without_effects(acceptance: DraftAcceptance | None = None) -> DraftAcceptance:
    acceptance = acceptance or DraftAcceptance.from_prior(DEPTH, "draft_model")
    acceptance.calibration._requests = NoEffects()
    return acceptance


def _raw() -> DraftAcceptance:
    acceptance = DraftAcceptance.from_prior(DEPTH, "draft_model")
    acceptance.calibration = RawConfidence(DEPTH, 0.0, 1.0)
    return _without_effects(acceptance)


@numba.njit(error_model="numpy")
def _shift_level(mean: Any, covariance: Any, whole: float, innovation: float) -> float:
    mean[0] += innovation
    covariance[0, 0] += innovation**2
    return whole


@dataclass(frozen=True, slots=True)
class Without:
    """A planner without one part.

    Attributes:
        swaps: What is handed in, by argument of `GoodputPlanner.build`.
        constants: What is patched: module, name and value.
    """

    swaps: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    constants: Sequence[tuple[Any, str, Any]] = ()


def _patched(module: Any, **constants: Any) -> Without:
    return Without(constants=[(module, *constant) for constant in constants.items()])


def _recompiled(**names: Any) -> Without:
    """Compile the filter's step with other globals."""
    learn = cost_filter.learn_sample.py_func  # type: ignore[attr-defined]  # numba's
    learn = FunctionType(learn.__code__, learn.__globals__ | names)
    return _patched(cost_table, learn_sample=numba.njit(error_model="numpy")(learn))


PARTS: Mapping[str, Without] = {
    NOTHING: Without(),
    "constant": _recompiled(_shift=_shift_level),
    "shift": _recompiled(SHIFT_SAMPLES=NEVER),
    "request effects": Without({"acceptance": _without_effects}),
    "calibration": Without({"acceptance": _raw}),
    "second-pass timer": _patched(exploration, TIME_PASS_EVERY=NEVER),
    "exploring": Without({"exploration": NoExploring}),
    "exploring by cost": Without({"exploration": ConstantInterval}),
    "exploring few requests": Without({"exploration": AllRows}),
    "EXPLORE_DEPTH 2, not 1": _patched(exploration, EXPLORE_DEPTH=1),
    "probes": _patched(exploration, PROBE_EVERY=NEVER),
    "backlog in the plan": Without({"backlog": NoBacklog}),
    "REPLAN_EVERY 8, not 1": _patched(depth_control, REPLAN_EVERY=1),
    "SAME_LOAD 16, not any change": _patched(depth_control, SAME_LOAD=NEVER),
    "replanning at another load": _patched(depth_control, SAME_LOAD=0),
    "KEEP_DEPTH_GAIN 1.01, not 1": _patched(depth_control, KEEP_DEPTH_GAIN=1.0),
    "LEARN_EVERY 4, not 1": _patched(goodput, LEARN_EVERY=1),
    "FLUSH_EVERY 2 to 8, not 1": _patched(draft_acceptance, FLUSH_EVERY=range(1, 2)),
}


def play(
    without: Without, stretches: Sequence[Stretch], bursts: float, seed: int
) -> dict[str, float]:
    """Play stretches one after the other; the first, for learning, does not count."""
    with ExitStack() as stack:
        for module, name, value in without.constants:
            stack.enter_context(patch.object(module, name, value))
        limits = engine_limits([step for one in stretches for step in one.steps])
        made = {name: make() for name, make in without.swaps.items()}
        planner = GoodputPlanner.build(DEPTH, limits, **made)
        rng = np.random.default_rng(seed)
        _profile(planner, stretches[0].prices, rng)
        clock: Any = ErringClock(planner, rng, stretches[0].noise, bursts)
        tokens = ms = 0.0
        for number, stretch in enumerate(stretches):
            clock.recorded = stretch.noise
            played = play_planner(stretch.steps, clock, stretch.prices)
            if number > 0:
                tokens += float(played.tokens.sum())
                ms += float(played.ms.sum())
    return {
        "goodput_per_s": 1e3 * tokens / ms,
        "calibration_error": planner.acceptance.calibration.calibration_error() or 0.0,
        "step_time_error": planner.cost.prediction_error(),
        "num_cost_resets": planner.cost.report()["num_cost_resets"],
    }


def _profile(
    planner: GoodputPlanner, prices: StepPrices, rng: np.random.Generator
) -> None:
    """Time passes as an engine does at its start, with small errors."""
    counts = np.asarray(2.0 ** np.arange(8), dtype=np.float64)
    errors = np.exp(rng.normal(0.0, 0.02, (2, counts.size)))
    target_ms, draft_ms = (
        tuple((curve.at(counts) * own).tolist())
        for curve, own in zip((prices.target, prices.draft_first), errors, strict=True)
    )
    planner.fit_profile(
        CostProfile(tuple(map(int, counts.tolist())), target_ms, draft_ms)
    )


Job = tuple[int, int, str, str, Sequence[Stretch], float]
"""Number of the list, of the repeat, then what `list_scenarios` yields."""


def measure(job: Job) -> list[Row]:
    """Play one scenario with every part left out in turn, under the same noise."""
    number, repeat, scenario, cell, stretches, bursts = job
    where = {"scenario": scenario, "cell": cell, "list": number, "repeat": repeat}
    return [
        {"part": part} | where | play(without, stretches, bursts, number + 100 * repeat)
        for part, without in PARTS.items()
    ]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what every part brings, in per cent of goodput, by scenario and overall.

    That is goodput with the part over goodput without it, minus 1, on the same trace
    under the same noise. The interval is Student's over traces, each of which counts
    with its mean over scenarios.
    """
    with_all = {_key(row): row["goodput_per_s"] for row in rows if _is_whole(row)}
    found: dict[str, Any] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        benefits: dict[str, dict[Any, dict[str, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for row in own:
            benefit = 100.0 * (with_all[_key(row)] / row["goodput_per_s"] - 1.0)
            temperature = f"{OVERALL} at temperature {row['cell'].split('-')[1][1:]}"
            for group in (OVERALL, temperature, row["scenario"]):
                trace = benefits[group][row["cell"], row["list"]]
                trace[row["scenario"]].append(benefit)
        found[part] = {
            group: _interval([_mean_of_means(one) for one in by_trace.values()])
            for group, by_trace in sorted(benefits.items())
            if part != NOTHING
        } | {
            f"{name} without it": round(float(np.mean([row[name] for row in own])), 4)
            for name in ("calibration_error", "step_time_error", "num_cost_resets")
        }
    return found


def _key(row: Row) -> tuple[str, str, int, int]:
    return row["scenario"], row["cell"], row["list"], row["repeat"]


def _is_whole(row: Row) -> bool:
    return bool(row["part"] == NOTHING)


def _mean_of_means(by_scenario: Mapping[str, Sequence[float]]) -> float:
    return float(np.mean([np.mean(one) for one in by_scenario.values()]))


def _interval(values: Sequence[float]) -> dict[str, float]:
    mean = float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    ends = {"mean": mean, "low": mean - half, "high": mean + half}
    return {name: round(end, 3) for name, end in ends.items()} | {"n": len(values)}


def main(argv: Sequence[str] | None = None) -> None:
    """Play everything and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--prices", type=Path, default=MEASUREMENTS, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--repeats", type=int, default=1, metavar="N")
    options = parser.parse_args(argv)
    prices = fit_measured(options.prices)
    jobs: list[Job] = []
    for number, folder in enumerate(options.traces, 1):
        found = load_traces(folder, CELLS, [LENDER])
        drafts = {cell: own[LENDER] for cell, own in found.items()}
        for scenario in list_scenarios(drafts, prices):
            jobs += [(number, repeat, *scenario) for repeat in range(options.repeats)]
    rows: list[Row] = []
    with multiprocessing.Pool(options.processes) as pool:
        for own_rows in pool.imap_unordered(measure, jobs):
            rows += own_rows
            sys.stderr.write(f"{len(rows)} of {len(jobs) * len(PARTS)} plays\n")
    write(rows, options.output)


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write what was found, and where."""
    results = {
        "machine": describe_machine(),
        "versions": describe_versions() | {"numba": numba.__version__},
        **describe_piece(),
        "traces": sorted({f"{row['cell']} of list {row['list']}" for row in rows}),
        "num_plays": len(rows),
        "benefit_per_cent": summarise(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
