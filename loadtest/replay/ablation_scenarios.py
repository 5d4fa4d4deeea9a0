"""Recorded drafts at prices that drift, under a clock that errs, for ablations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from loadtest.arms import Arm
from loadtest.engine.plan import Cell
from policies.goodput import GoodputPlanner
from policies.types import StepTiming

from .prices import ContextPrice, PriceCurve, StepPrices, decode_steps, fit_curve
from .replay import ReplayStep, read_steps
from .traces import Array, RecordedTrace

DEPTH = 8
LENDER = Arm("fixed", DEPTH)
CELLS = [Cell("mixed", t, c) for t in (0.0, 1.0) for c in (1, 4, 16)]
MEASUREMENTS = Path(__file__).parents[1] / "results/engine-cpu/measurements.jsonl"

MAX_STEPS = 160
"""Of a stretch of constant prices."""

HOST_MS, HOST_REQ_MS = 1.0, 0.05
CONTEXT_MS = 8e-4
"""Of a KV position: 1e-4 of the demo target's step."""

COUNTS = np.array([1.0, 4, 8, 16, 32, 64, 128, 256])
"""Knots of the target's price."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Recorded steps at constant prices.

    Attributes:
        steps: In order.
        prices: What they cost.
        noise: Recorded factors of step times, in order; empty for made-up ones.
    """

    steps: Sequence[ReplayStep]
    prices: StepPrices
    noise: Array


@dataclass(slots=True)
class ErringClock:
    """Stands between replay and planner and makes step times err.

    Attributes:
        planner: Everything but timings is passed on to it.
        rng: Of the errors.
        recorded: As `Stretch.noise`.
        bursts: Share of the steps with which a few slow ones begin.
    """

    planner: GoodputPlanner
    rng: np.random.Generator
    recorded: Array
    bursts: float = 0.0
    _step: int = field(init=False)
    _wander: float = field(init=False, default=0.0)
    _burst_left: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Begin somewhere in the record."""
        self._step = int(self.rng.integers(max(self.recorded.size, 1)))

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self.planner, name)

    def observe_timing(self, timing: StepTiming) -> None:
        """Show the planner what an erring clock says."""
        jitter = self.rng.normal(0.0, 0.05, 4)
        self._wander = 0.99 * self._wander + self.rng.normal(0.0, 0.015)
        factor = np.exp(self._wander)
        if self.recorded.size:
            jitter *= 0.5
            factor = self.recorded[self._step % self.recorded.size]
            self._step += 1
        if self._burst_left == 0 and self.rng.random() < self.bursts:
            self._burst_left = int(self.rng.integers(1, 4))
        if self._burst_left:
            self._burst_left -= 1
            factor *= self.rng.uniform(2.0, 5.0)
        target, first, later, host = (factor * np.exp(jitter)).tolist()
        self.planner.observe_timing(
            replace(
                timing,
                target_ms=target * timing.target_ms,
                draft_first_ms=first * timing.draft_first_ms,
                draft_next_ms=later * timing.draft_next_ms,
                host_ms=host * timing.host_ms,
            )
        )


@dataclass(frozen=True, slots=True)
class PriceFit:
    """Prices fitted to measured step times of fixed lengths.

        step = target(tokens) + first(tokens) + (k - 1) * next(reqs) + host(reqs)

    Attributes:
        quiet: Coefficients.
        neighbour: The same while another process takes a core.
    """

    quiet: Array
    neighbour: Array

    def at(self, num_reqs: int, *, neighbour: bool = False) -> StepPrices:
        """Return the prices at a load."""
        found = self.neighbour if neighbour else self.quiet
        target_ms, rest = np.split(found, [COUNTS.size])
        seen = ~np.isnan(target_ms)
        counts = COUNTS[seen]
        return StepPrices(
            target=PriceCurve(counts, np.maximum.accumulate(target_ms[seen])),
            draft_first=PriceCurve(counts, rest[0] + rest[1] * counts),
            draft_next_ms=float(rest[2] + rest[3] * num_reqs),
            host_ms=HOST_MS + HOST_REQ_MS * num_reqs,
            context=ContextPrice(CONTEXT_MS, 150.0 * num_reqs),
        )


def fit_measured(path: Path) -> PriceFit:
    """Fit prices to what `measurements.jsonl` says of arms of fixed depth."""
    groups = [json.loads(line) for line in path.read_text().splitlines() if line]
    quiet, beside = [], []
    for row in (row for group in groups for row in group):
        policy, _, depth = row["policy"].partition(":")
        if policy not in ("none", "fixed") or row["temperature"] > 0.0:
            continue
        case, after = (row["concurrency"], int(depth or 0)), row["after_switch"]
        if row["workload"] == "mixed":
            quiet.append((*case, 1e3 * row["window_s"] / row["num_steps"]))
        elif row["workload"] == "drift-neighbour" and after:
            beside.append((*case, float(np.median(np.diff(after["end_ms"])))))
    return PriceFit(_fit(np.array(quiet)), _fit(np.array(beside)))


def _fit(cases: Array) -> Array:
    """Solve for coefficients >= 0, by relative error; NaN beyond what was measured."""
    num_reqs, depth, ms = cases.T
    counts = num_reqs * (1.0 + depth)
    hats = [np.interp(counts, COUNTS, unit) for unit in np.eye(COUNTS.size)]
    drafts, later = depth > 0, np.maximum(depth - 1.0, 0.0)
    design = np.array([*hats, drafts, drafts * counts, later, later * num_reqs]).T
    ms = ms - HOST_MS - HOST_REQ_MS * num_reqs
    # Next to nothing pulls neighbouring knots together where little was measured.
    smooth = 0.02 * np.diff(np.eye(design.shape[1]), axis=0)[: COUNTS.size - 1]
    smooth /= np.diff(COUNTS)[:, None] ** 0.5
    found, _ = optimize.nnls(
        np.vstack((design / ms[:, None], smooth)),
        np.concatenate((np.ones_like(ms), np.zeros(len(smooth)))),
    )
    found[: COUNTS.size][counts.max() < COUNTS] = np.nan
    return np.asarray(found)


def list_scenarios(
    drafts: Mapping[Cell, RecordedTrace], prices: PriceFit
) -> Iterator[tuple[str, str, Sequence[Stretch], float]]:
    """Yield name, cell, stretches in a row, and share of bursts."""
    for cell, trace in drafts.items():
        own = read_stretch(trace, prices.at(cell.concurrency))
        plain = replace(own, noise=np.empty(0))
        beside = replace(plain, prices=prices.at(cell.concurrency, neighbour=True))
        dear = _change(plain, drafter=8.0)
        later_ms = 20.0 * own.prices.draft_next_ms
        later = replace(plain, prices=replace(own.prices, draft_next_ms=later_ms))
        for name, stretches, bursts in (
            ("recorded noise", (own, own, own), 0.0),
            ("made-up noise", (plain, plain, plain), 0.0),
            ("bursts", (plain, plain, plain), 0.03),
            ("all slower", (plain, _change(plain, 2.5, 2.5), plain), 0.0),
            ("recorded neighbour", (plain, beside, plain), 0.0),
            ("passes wait", (plain, _change(plain, wait=3.0), plain), 0.0),
            ("drafter slower", (plain, dear, plain), 0.0),
            ("drafter gets cheap", (dear, plain, plain), 0.0),
            ("later passes get cheap", (later, plain, plain), 0.0),
            ("harder drafts", (plain, _harder(plain), plain), 0.0),
            ("long contexts", (plain, _change(plain, context=900), plain), 0.0),
        ):
            yield name, cell.name, stretches, bursts
    for temperature in (0.0, 1.0):
        loads = [Cell("mixed", temperature, c) for c in (1, 16, 4, 16)]
        if all(load in drafts for load in loads):
            found = [read_stretch(drafts[c], prices.at(c.concurrency)) for c in loads]
            quiet = [replace(load, noise=np.empty(0)) for load in found]
            yield "load changes", f"mixed-t{temperature:g}", quiet, 0.0


def read_stretch(trace: RecordedTrace, prices: StepPrices) -> Stretch:
    """Read the drafts of an arm that verified all of them."""
    kept = decode_steps(trace)
    counts, ms = trace.step("num_decode_tokens")[kept], trace.step("target_ms")[kept]
    noise = ms / fit_curve(counts, ms).at(counts)
    return Stretch(read_steps(trace, DEPTH)[:MAX_STEPS], prices, noise)


def _harder(stretch: Stretch) -> Stretch:
    """Return the same drafts, each position of which fails three times in ten more."""
    rng = np.random.default_rng(0)
    steps = []
    for step in stretch.steps:
        fails_at = rng.geometric(0.3, step.num_accepted.size) - 1
        num_accepted = np.minimum(step.num_accepted, fails_at)
        steps.append(replace(step, num_accepted=num_accepted))
    return replace(stretch, steps=steps)


def _change(
    stretch: Stretch,
    target: float = 1.0,
    drafter: float = 1.0,
    wait: float = 0.0,
    context: int = 0,
) -> Stretch:
    """Return the same steps at other prices.

    Args:
        stretch: What is changed.
        target: Factor on the target's passes.
        drafter: Factor on the drafter's.
        wait: What every pass takes longer, in passes over one token.
        context: KV positions that every request has more.
    """

    def change(curve: PriceCurve, factor: float) -> PriceCurve:
        waits_ms = wait * float(curve.at(1.0))
        return replace(curve, price_ms=factor * (curve.price_ms + waits_ms))

    own = stretch.prices
    prices = replace(
        own,
        target=change(own.target, target),
        draft_first=change(own.draft_first, drafter),
        draft_next_ms=drafter * (1.0 + wait) * own.draft_next_ms,
        context=replace(own.context, per_token_ms=target * own.context.per_token_ms),
    )
    steps = []
    for step in stretch.steps:
        more = step.num_context_tokens + context * step.num_reqs
        steps.append(replace(step, num_context_tokens=more))
    return replace(stretch, steps=steps, prices=prices)
