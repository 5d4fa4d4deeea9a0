"""The goodput policy with what it estimates fitted offline, or as it was recorded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.draft_acceptance import DraftAcceptance
from policies.estimators.request_effects import RequestEffects
from policies.estimators.step_cost import StepCost
from policies.exploration import Exploration
from policies.goodput import GoodputPlanner
from policies.types import EngineLimits, StepTiming

from .offline_fit import fit_offline
from .prices import PriceCurve, StepPrices
from .replay import Played, ReplayStep, play_planner
from .traces import Array


def play_hindsight(
    steps: Sequence[ReplayStep], prices: StepPrices, max_depth: int
) -> Played:
    """Let the goodput policy decide, its calibration and costs fitted on these steps.

    Depth by depth, draft by draft and with the early end of drafts it does what it does
    in an engine, save learning and exploring: it knows what it would learn. What it
    keeps of recent drafts comes from a first time through all steps.
    """
    limits = engine_limits(steps)
    acceptance = DraftAcceptance.from_prior(max_depth, limits.method)
    acceptance.calibration = fit_calibration(steps, max_depth)
    planner = GoodputPlanner.build(
        max_depth,
        limits,
        acceptance=acceptance,
        # Its interface is all the planner looks at.
        cost=cast(StepCost, _KnownCost(prices)),
        exploration=_NoExploration(),
    )
    play_planner(steps, planner, prices)
    return play_planner(steps, planner, prices)


def play_online(
    steps: Sequence[ReplayStep],
    prices: StepPrices,
    max_depth: int,
    state: dict[str, Any],
) -> Played:
    """Let the goodput policy decide as it does in an engine, learning as it goes.

    Args:
        steps: Gone through twice; the first time it gets used to the load.
        prices: What is charged, and what it learns costs from.
        max_depth: Deepest draft.
        state: What it had learnt when the trace began; {} starts from its priors.
    """
    planner = GoodputPlanner.build(max_depth, engine_limits(steps))
    planner.import_state(state)
    play_planner(steps, planner, prices)
    return play_planner(steps, planner, prices)


def engine_limits(steps: Sequence[ReplayStep]) -> EngineLimits:
    """Return the limits of an engine that skips the drafter and ends drafts early."""
    return EngineLimits(
        max_reqs=max(step.num_reqs for step in steps),
        skips_drafter=True,
        exits_early=True,
    )


def fit_calibration(
    steps: Sequence[ReplayStep], max_depth: int
) -> ConfidenceCalibration:
    """Return the calibration that all outcomes of some steps together speak for.

    It stays as it is. Requests have their effects from their first draft on.
    """
    fit = fit_offline(steps, max_depth)
    calibration = _KnownCalibration(max_depth)
    none = [0.0] * max_depth
    calibration.import_state(
        {
            "intercept": fit.intercept.tolist(),
            "slope": fit.slope,
            "info_intercept": none,
            "info_cross": none,
            "info_slope": 0.0,
        }
    )
    # Its interface is all the calibration looks at.
    calibration._requests = cast(RequestEffects, _KnownEffects(fit.effects))
    return calibration


class _KnownCalibration(ConfidenceCalibration):
    """Keeps to what it was given."""

    def observe(self, *_: Any, **__: Any) -> None:
        pass

    def age(self) -> None:
        pass

    def forget(self, _req_id: Hashable) -> None:
        pass


class _KnownEffects:
    """Effects of requests in the place of learnt ones."""

    def __init__(self, effects: Mapping[int, float]) -> None:
        self._effects = effects

    def log_odds(self, req_ids: Sequence[int]) -> Array:
        return np.array([self._effects[req_id] for req_id in req_ids])


class _KnownCost:
    """Prices in the place of a learnt cost model."""

    context_per_req = 0.0
    usual_prefill_tokens = 0.0

    def __init__(self, prices: StepPrices) -> None:
        self._prices = prices
        self._noted: list[StepTiming] = []
        self.target = _KnownTable(prices.target)
        self.draft_first = _KnownTable(prices.draft_first)
        ends = np.array([1.0, 2.0])
        self.draft_next = _KnownTable(
            PriceCurve(ends, np.full(2, prices.draft_next_ms))
        )

    def draft_next_ms(self, _num_reqs: int, depth: Any) -> Array:
        passes = np.maximum(np.asarray(depth, dtype=np.float64) - 1.0, 0.0)
        return np.asarray(passes * self._prices.draft_next_ms)

    def host_ms(self, _num_reqs: int) -> float:
        return self._prices.host_ms

    def context_ms(self, num_context_tokens: float) -> float:
        return float(self._prices.context.at(num_context_tokens))

    def note(self, timing: StepTiming) -> None:
        self._noted.append(timing)

    def learn_noted(self, at_least: int) -> Sequence[StepTiming]:
        """Know everything already."""
        if len(self._noted) < at_least:
            return ()
        timings, self._noted = self._noted, []
        latest = timings[-1]
        self.context_per_req = latest.num_context_tokens / max(latest.num_reqs, 1)
        return timings


class _KnownTable:
    """A price curve in the place of a learnt table."""

    def __init__(self, curve: PriceCurve) -> None:
        self._curve = curve

    def predict(self, count: Any) -> Array:
        return np.where(np.asarray(count) > 0, self._curve.at(count), 0.0)

    def add_range(self, prices: Array, first: int) -> None:
        prices += self.predict(first + np.arange(prices.size))

    def at(self, count: float) -> float:
        return float(self.predict(count))


class _NoExploration(Exploration):
    """Keeps to the plan."""

    def adjust_depth(self, depth: int, max_depth: int) -> int:  # noqa: ARG002 - overridden
        return depth

    def is_pass_due(self) -> bool:
        return False

    def is_probing(self) -> bool:
        return False
