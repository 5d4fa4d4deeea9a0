"""The goodput planner: budget, depth and batch that follow live capacity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from policies.acceptance import PositionAcceptance
from policies.admission import (
    BatchPlan,
    choose_max_running,
    choose_prefill_tokens,
    reserve_blocks,
)
from policies.batch import DraftSelection
from policies.budget import (
    DepthPlan,
    choose_draft_budget,
    foresee_depths,
    plan_depth,
    survival_threshold,
)
from policies.calibration import ConfidenceCalibration
from policies.cost import StepCost
from policies.selection import compute_survival, select_drafts

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from policies.admission import EngineLoad
    from policies.batch import DraftBatch, EngineLimits, VerificationOutcome
    from policies.cost import CostProfile, StepTiming

NUM_REMEMBERED_DRAFTS = 96
"""Recent drafts that stand for the next ones when the depth is chosen: a few steps of
a large batch, about a hundred steps of a single request."""

REPLAN_EVERY = 4
"""Steps between two choices of the depth at an unchanged number of requests."""

REBATCH_EVERY = 16
"""Steps between two choices of how many requests may run."""

LEARN_EVERY = 4
"""Steps whose outcomes are learnt from together."""

EXPLORE_EVERY = 48
"""At depth 0 one step in this many drafts anyway, for fresh confidence when the load
falls, or fewer where catching up makes that dear."""

MAX_EXPLORE_SHARE = 0.004
"""Share of the time that exploring should take at most."""

MAX_EXPLORE_INTERVAL = 400
"""Steps after which a drafter is tried again however dear it seems to be: the price
may be an old one."""

PROBE_EVERY = 128
"""While drafting, one step in this many verifies nothing: the price of a plain step is
what every draft is compared with, and an old or guessed one would confirm itself."""

FIRST_PROBES = frozenset({16, 32, 48, 64})
"""The first probes come sooner, once the cost model has found its level."""

EXPLORE_DEPTH = 2
"""Depth of an exploring step: enough to see how acceptance falls with position."""

RESUME_HORIZON_STEPS = 40
"""Catching up after the drafter was skipped is paid off over this many steps: the load
that made drafting worthwhile is expected to last about as long."""

KEEP_DEPTH_GAIN = 1.01
"""A new depth must promise this much more than the current one: estimates move by
about a per cent from step to step, and flapping has a price of its own."""


class _Outcome(NamedTuple):
    """What became of one request's draft."""

    req_id: Hashable
    confidence: NDArray[np.float64]
    num_verified: int
    num_accepted: int


@dataclass(slots=True)
class GoodputPlanner:
    """Verify a draft token when it is worth the time it costs.

    Each step

    1. predicts, for every depth, the best goodput at the present load from recent
       drafts and the learnt step cost; the best depth is drafted next, its goodput is
       the price of a millisecond (`budget.plan_depth`);
    2. verifies the top drafts by survival up to the count where tokens minus priced
       time is largest (`budget.choose_draft_budget`).

    Sampled drafts are admitted by a survival threshold fixed before the block was
    drawn: admission then depends on nothing but the prefix. What the planner learns
    from a step's clock is used one step later, for the same reason.

    Attributes:
        max_depth: Deepest draft.
        limits: The engine's.
        latency_target_ms: Longest step wanted, or None. A step is the time between
            two tokens of a request.

    Source: ours; goodput as in arXiv 2406.14066, selection as in arXiv 2502.15197.
    """

    max_depth: int
    limits: EngineLimits
    latency_target_ms: float | None = None
    calibration: ConfidenceCalibration = field(init=False)
    cost: StepCost = field(init=False)
    plan: DepthPlan = field(init=False)
    _positions: PositionAcceptance = field(init=False)
    _recent: NDArray[np.float64] = field(init=False)
    _num_recent: int = field(init=False, default=0)
    _confidence: dict[Hashable, NDArray[np.float64]] = field(
        init=False, default_factory=dict
    )
    _steps_at_zero: int = field(init=False, default=0)
    _steps_planned: int = field(init=False, default=0)
    _max_running: int = field(init=False, default=0)
    _outcomes: list[_Outcome] = field(init=False, default_factory=list)
    _steps_observed: int = field(init=False, default=0)
    _steps_selected: int = field(init=False, default=0)
    _planned_reqs: int = field(init=False, default=0)
    _exploring: bool = field(init=False, default=False)
    _context_per_req: float = field(init=False, default=0.0)
    _num_missing: int = field(init=False, default=0)
    _pending_timings: list[StepTiming] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Start from the priors, at depth 1: cheap, and it teaches."""
        self.calibration = ConfidenceCalibration(self.max_depth)
        self.cost = StepCost(self.limits.max_tokens, self.limits.max_reqs)
        self.plan = DepthPlan(depth=1, tokens_per_ms=0.0, budget_per_req=0.0)
        self._positions = PositionAcceptance(self.max_depth)
        # Acceptance of recent drafts, a ring; NaN past what a draft had.
        self._recent = np.full((NUM_REMEMBERED_DRAFTS, self.max_depth), np.nan)

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit the drafts that are worth their time at the current goodput."""
        acceptance = self._predict_acceptance(batch)
        survival = compute_survival(acceptance)
        present = np.arange(survival.shape[1]) < batch.num_draft_tokens[:, None]
        candidates = np.sort(survival[present])[::-1]
        if candidates.size == 0:
            return DraftSelection(batch.num_draft_tokens, draft_budget=0)
        if self._is_probing():
            draft_budget, limited = 0, False
        else:
            draft_budget, limited = self._choose_budget(candidates, batch)
        self._remember(batch, acceptance)
        return DraftSelection(
            num_admitted=select_drafts(survival, batch.num_draft_tokens, draft_budget),
            draft_budget=draft_budget,
            expected_accepted=float(candidates[:draft_budget].sum()),
            limited_by_latency=limited,
        )

    def choose_depth(self, num_reqs: int) -> int:
        """Choose the depth with the best expected goodput for `num_reqs` requests."""
        if num_reqs < 1:
            return self.plan.depth
        self._steps_planned += 1
        if self._steps_planned % REPLAN_EVERY == 0 or num_reqs != self._planned_reqs:
            self._planned_reqs = num_reqs
            self.plan = self._plan_depth(num_reqs)
        self._exploring = False
        if self.plan.depth > 0:
            self._steps_at_zero = 0
            return self.plan.depth
        self._steps_at_zero += 1
        if self._steps_at_zero >= self._explore_interval(num_reqs):
            self._steps_at_zero = 0
            self._exploring = True
            return min(EXPLORE_DEPTH, self.max_depth)
        return 0

    def plan_batch(self, load: EngineLoad) -> BatchPlan:
        """Choose how many requests run and how much prompt joins the step."""
        if self._max_running == 0 or self._steps_planned % REBATCH_EVERY == 0:
            self._max_running = choose_max_running(
                self.cost,
                self._context_per_req,
                self.limits.max_reqs,
                self.latency_target_ms,
            )
        return BatchPlan(
            max_running=self._max_running,
            max_prefill_tokens=choose_prefill_tokens(
                self.cost, load, self.limits.max_tokens, self.latency_target_ms
            ),
            reserved_blocks=reserve_blocks(load),
        )

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn acceptance from a finished step, and costs of the steps before it."""
        self._learn_costs()
        self._positions.observe(outcome)
        for index, req_id in enumerate(outcome.req_ids):
            confidence = self._confidence.get(req_id)
            if confidence is not None:
                self._outcomes.append(
                    _Outcome(
                        req_id,
                        confidence,
                        int(outcome.num_verified[index]),
                        int(outcome.num_accepted[index]),
                    )
                )
        self._steps_observed += 1
        if self._steps_observed % LEARN_EVERY == 0 and self._outcomes:
            self._learn_acceptance()

    def observe_timing(self, timing: StepTiming) -> None:
        """Take in a step's timing; it is learnt from once the next step has finished.

        The step that was timed also drew the drafts that are selected next, so its
        clock readings must not decide about them.
        """
        self._pending_timings.append(timing)

    def fit_profile(self, profile: CostProfile) -> None:
        """Start from forward passes timed at start-up instead of from priors."""
        self.cost.fit_profile(profile)

    def forget(self, req_id: Hashable) -> None:
        """Drop what is known about a finished request."""
        self._confidence.pop(req_id, None)
        self.calibration.forget(req_id)

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry: plan, errors, prices."""
        return {
            "expected_goodput_per_s": 1e3 * self.plan.tokens_per_ms,
            "planned_budget_per_req": self.plan.budget_per_req,
            "calibration_error": self.calibration.calibration_error(),
            **self.cost.report(),
        }

    def export_state(self) -> dict[str, Any]:
        """Return what a new replica of the same pair can start from."""
        return {
            "calibration": self.calibration.export_state(),
            "cost": self.cost.export_state(),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start warm from another planner's `export_state`.

        Raises:
            ValueError: If it was learnt at another depth.
        """
        self.calibration.import_state(state["calibration"])
        self.cost.import_state(state["cost"])

    def _predict_acceptance(self, batch: DraftBatch) -> NDArray[np.float64]:
        if batch.confidence is None:
            per_position = self._positions.estimate()[: batch.max_depth]
            return np.broadcast_to(per_position, (batch.num_reqs, per_position.size))
        req_ids = batch.req_ids or tuple(range(batch.num_reqs))
        return self.calibration.predict(batch.confidence, req_ids)

    def _choose_budget(
        self, candidates: NDArray[np.float64], batch: DraftBatch
    ) -> tuple[int, bool]:
        num_decodes = max(batch.num_decodes, batch.num_reqs)
        price = self.plan.tokens_per_ms
        if batch.drafts_are_sampled:
            width = max(1.0, 2.0 * self.plan.budget_per_req * num_decodes)
            ends = np.array([num_decodes, num_decodes + width])
            threshold = survival_threshold(self._verify_ms(ends), width, price)
            return int(np.count_nonzero(candidates >= threshold)), False
        counts = np.arange(candidates.size + 1, dtype=np.float64)
        step_ms = self._verify_ms(num_decodes + counts, batch.num_prefill_tokens)
        choice = choose_draft_budget(
            candidates, step_ms, price, max_step_ms=self._room_for_verifying(batch)
        )
        if self._exploring:
            return max(choice.draft_budget, 1 + candidates.size // 8), False
        return choice.draft_budget, choice.limited_by_latency

    def _is_probing(self) -> bool:
        """Tell, by counting alone, whether this step's drafts are left unverified."""
        self._steps_selected += 1
        return (
            self._steps_selected in FIRST_PROBES
            or self._steps_selected % PROBE_EVERY == 0
        )

    def _room_for_verifying(self, batch: DraftBatch) -> float | None:
        """Return what the latency target leaves for target and first draft pass."""
        if self.latency_target_ms is None:
            return None
        fixed = self.cost.host_ms(batch.num_reqs)
        fixed += self.cost.context_ms(batch.num_context_tokens)
        fixed += float(self.cost.draft_next_ms(batch.num_reqs, self.plan.depth))
        return self.latency_target_ms - fixed

    def _verify_ms(
        self, num_decode_tokens: NDArray[np.float64], num_prefill_tokens: int = 0
    ) -> NDArray[np.float64]:
        """Price the parts of a step that grow with its verified tokens.

        The drafter's first pass runs over every token of the step, rejected ones
        included; its further passes, the host and the context do not depend on them.
        """
        return self.cost.target.predict(
            num_decode_tokens
        ) + self.cost.draft_first.predict(num_decode_tokens + num_prefill_tokens)

    def _remember(self, batch: DraftBatch, acceptance: NDArray[np.float64]) -> None:
        drafting = np.nonzero(batch.num_draft_tokens)[0][-NUM_REMEMBERED_DRAFTS:]
        depth = acceptance.shape[1]
        rows = np.full((drafting.size, self.max_depth), np.nan)
        present = np.arange(depth) < batch.num_draft_tokens[drafting, None]
        rows[:, :depth] = np.where(present, acceptance[drafting], np.nan)
        slots = (self._num_recent + np.arange(drafting.size)) % NUM_REMEMBERED_DRAFTS
        self._recent[slots] = rows
        self._num_recent += drafting.size
        if batch.confidence is not None:
            self._confidence.update(zip(batch.req_ids, batch.confidence, strict=False))

    def _plan_depth(self, num_reqs: int) -> DepthPlan:
        """Compare all depths at the present load, by recent drafts and costs."""
        # Depths that were not drafted lately take the mean acceptance of the positions.
        typical = self.calibration.mean_acceptance(self.max_depth)
        recent = self._recent[: max(1, min(self._num_recent, NUM_REMEMBERED_DRAFTS))]
        outlook = foresee_depths(np.where(np.isnan(recent), typical, recent))
        num_tokens = num_reqs * (1.0 + outlook.verified)
        step_ms = self._verify_ms(num_tokens)
        step_ms += self.cost.host_ms(num_reqs)
        step_ms += self.cost.context_ms(self._context_per_req * num_reqs)
        depths = np.arange(self.max_depth + 1)
        step_ms += self.cost.draft_next_ms(num_reqs, depths)[:, None]
        if self.limits.skips_drafter:
            step_ms[0] -= self.cost.draft_first.predict(num_tokens[0])
            step_ms[1:] += self._catch_up_ms() / RESUME_HORIZON_STEPS
        return plan_depth(
            outlook,
            step_ms,
            num_reqs,
            self.plan.depth,
            keep_gain=KEEP_DEPTH_GAIN,
            max_step_ms=self.latency_target_ms,
        )

    def _learn_costs(self) -> None:
        for timing in self._pending_timings:
            self.cost.observe(timing)
            self._context_per_req = timing.num_context_tokens / max(timing.num_reqs, 1)
            if self.limits.skips_drafter and timing.depth == 0:
                # Requests that end take their share of the missing positions along.
                self._num_missing = min(
                    self._num_missing + timing.num_tokens, timing.num_context_tokens
                )
            else:
                self._num_missing = 0
        self._pending_timings.clear()

    def _learn_acceptance(self) -> None:
        outcomes = self._outcomes
        confidence = np.zeros((len(outcomes), self.max_depth))
        for index, outcome in enumerate(outcomes):
            confidence[index, : outcome.confidence.size] = outcome.confidence
        self.calibration.observe(
            confidence,
            [outcome.req_id for outcome in outcomes],
            np.array([outcome.num_verified for outcome in outcomes]),
            np.array([outcome.num_accepted for outcome in outcomes]),
        )
        outcomes.clear()

    def _explore_interval(self, num_reqs: int) -> float:
        """Return how many steps at depth 0 go by between two that draft anyway."""
        step_ms = float(self._verify_ms(np.array([float(num_reqs)]))[0])
        price_ms = self._catch_up_ms() + float(
            self.cost.draft_first.predict(float(num_reqs))
            + self.cost.draft_next_ms(num_reqs, EXPLORE_DEPTH)
        )
        interval = price_ms / (MAX_EXPLORE_SHARE * max(step_ms, 1e-6))
        return float(np.clip(interval, EXPLORE_EVERY, MAX_EXPLORE_INTERVAL))

    def _catch_up_ms(self) -> float:
        return self.cost.draft_first.at(self._num_missing)
