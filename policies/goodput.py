"""The goodput planner: budget, depth and batch that follow live capacity."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from policies.decisions.admission import Admission, DraftAdmission
from policies.decisions.batching import BatchControl
from policies.decisions.depth import DepthPlan
from policies.decisions.draft_costs import DraftCosts
from policies.decisions.recent_drafts import RecentDrafts
from policies.depth_control import DepthControl
from policies.estimators.draft_acceptance import DraftAcceptance
from policies.estimators.state import STATE_VERSION, check_version, read_part
from policies.estimators.step_cost import MIN_STEPS_TO_EXPORT, StepCost
from policies.planner import Planner
from policies.types import DraftSelection

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from policies.decisions.batching import BatchPlan, EngineLoad
    from policies.decisions.early_exit import EarlyExitRule
    from policies.types import (
        AcceptanceScale,
        CostProfile,
        DraftBatch,
        EngineLimits,
        StepTiming,
        VerificationOutcome,
    )

LEARN_EVERY = 4
"""Timed steps whose costs are learnt together."""


@dataclass(slots=True)
class GoodputPlanner(Planner):
    """Verify a draft token when it is worth the time it costs.

    Each step

    1. predicts, for every depth, the best goodput at this load from recent drafts and
       learnt costs; the best depth is drafted next, its goodput is what a millisecond
       is worth in tokens (`depth_control`);
    2. where the engine can, ends the draft after the pass that leaves less to gain
       than the next one costs (`early_exit`), however deep that is;
    3. verifies, after what latency-bound requests need (`latency`), the top drafts by
       survival times weight up to the count where tokens minus the worth of time is
       largest (`budget`).

    Sampled drafts are admitted by a survival threshold fixed before the block was
    drawn: admission then depends on nothing but the prefix. What the planner learns
    from a step's clock is used one step later, for the same reason.

    A token counts as its request's weight over the batch's mean.

    Attributes:
        acceptance: Estimates how likely drafts are to be accepted.
        cost: Estimates what a step costs.
        depth: Decides how deep to draft.
        admission: Decides which drafts are verified.
        batching: Decides how many requests run.

    Source: ours; goodput as in arXiv 2406.14066, selection as in arXiv 2502.15197.
    """

    acceptance: DraftAcceptance
    cost: StepCost
    depth: DepthControl
    admission: DraftAdmission
    batching: BatchControl

    @classmethod
    def build(
        cls,
        max_depth: int,
        limits: EngineLimits,
        latency_target_ms: float | None = None,
    ) -> Self:
        """Start from priors, at depth 1: cheap, and it teaches.

        Args:
            max_depth: Deepest draft, >= 1.
            limits: The engine's.
            latency_target_ms: Longest step, the time between a request's tokens, or
                None.
        """
        acceptance = DraftAcceptance.from_prior(max_depth, limits.method)
        cost = StepCost(limits.max_tokens, limits.max_reqs, limits.padded_sizes)
        first_plan = DepthPlan(depth=1, tokens_per_ms=0.0, budget_per_req=0.0)
        costs = DraftCosts(cost, first_plan)
        depth = DepthControl(
            limits, costs, acceptance, RecentDrafts(max_depth), latency_target_ms
        )
        return cls(
            acceptance,
            cost,
            depth,
            DraftAdmission(costs, latency_target_ms),
            BatchControl(cost, limits, latency_target_ms),
        )

    @property
    def plan(self) -> DepthPlan:
        """The latest plan."""
        return self.depth.costs.plan

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit the drafts that are worth their time at the current goodput."""
        if batch.max_depth == 0:
            return DraftSelection(batch.num_draft_tokens, draft_budget=0)
        acceptance = self.acceptance.predict(batch)
        weights = _normalise(batch.weights)
        exploration = self.depth.exploration
        # Who has a latency target counts on its drafts, whatever all of them gain.
        gain = self.plan.gain if batch.latency_targets_ms is None else np.inf
        is_probe = exploration.is_probing(
            gain, batch.num_decodes, has_prompts=batch.num_prefill_tokens > 0
        )
        if is_probe:
            nothing = np.zeros_like(batch.num_draft_tokens)
            admission = Admission(nothing, 0, 0, 0.0)
        else:
            explored = None
            if exploration.exploring:
                explored = exploration.pick_rows(batch.num_reqs)
            admission = self.admission.admit(batch, acceptance, weights, explored)
        self.depth.note_drafts(acceptance, batch.num_draft_tokens, weights)
        self.acceptance.feedback.note(batch)
        return DraftSelection(
            num_admitted=admission.num_admitted,
            draft_budget=admission.draft_budget,
            expected_accepted=admission.expected_accepted,
            num_cut_by_latency=admission.num_late,
            is_probe=is_probe,
            may_reallocate=True,
        )

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        """Choose the depth with the best expected goodput for `num_reqs` requests."""
        return self.depth.choose(num_reqs, latency_target_ms)

    def early_exit(
        self,
        req_ids: Sequence[Hashable],
        weights: NDArray[np.float64] | None = None,
    ) -> EarlyExitRule | None:
        """Return what drafting on must promise, by the latest plan."""
        return self.depth.early_exit(req_ids, _normalise(weights))

    def plan_batch(self, load: EngineLoad) -> BatchPlan:
        """Choose how many requests run and how much prompt joins the step."""
        num_steps = self.depth.cadence.num_steps
        return self.batching.plan(
            load,
            num_steps=num_steps,
            depth=self.plan.depth,
            tokens_in_full=self.plan.tokens_by_depth[-1],
            tokens_by_depth=self.depth.tokens_by_depth,
        )

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn, every few steps, the costs of the steps before, and acceptance."""
        for timing in self.cost.learn_noted(LEARN_EVERY):
            self.depth.note_timing(timing)
        self.acceptance.observe(outcome)

    def observe_timing(self, timing: StepTiming) -> None:
        """Take in a step's timing; it is learnt from once the next step has finished.

        The step that was timed also drew the drafts that are selected next, so its
        clock readings must not decide about them. Whether it left its drafter out was
        known before it drew any.
        """
        self.depth.note_finished(timing)
        self.cost.note(timing)

    def fit_profile(self, profile: CostProfile) -> None:
        """Start from forward passes timed at start-up instead of from priors."""
        self.cost.fit_profile(profile)

    def acceptance_scale(self, req_ids: Sequence[Hashable]) -> AcceptanceScale:
        """Return the calibration as numbers for these requests."""
        return self.acceptance.calibration.scale(req_ids)

    def best_fixed(self, num_reqs: int) -> int:
        """Return the length with the best goodput, were all drafts of it verified."""
        return self.depth.best_fixed(num_reqs)

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about."""
        self.depth.note_skipped_steps(num_steps)
        self.cost.prompts.skip(num_steps)

    def forget(self, req_id: Hashable) -> None:
        """Drop what is known about a finished request."""
        self.acceptance.forget(req_id)

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry: plan, errors, costs.

        No `calibration_error` where nothing has been calibrated.
        """
        gauges = {
            "expected_goodput_per_s": 1e3 * self.plan.rate,
            "planned_budget_per_req": self.plan.budget_per_req,
            **self.cost.report(),
        }
        error = self.acceptance.calibration.calibration_error()
        return gauges if error is None else gauges | {"calibration_error": error}

    def export_state(self) -> dict[str, Any]:
        """Return what a new replica of the same pair can start from."""
        if self.cost.num_steps < MIN_STEPS_TO_EXPORT:
            return {}
        return {
            "version": STATE_VERSION,
            **self.acceptance.export_state(),
            "cost": self.cost.export_state(),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start warm from another planner's `export_state`; {} changes nothing.

        Raises:
            ValueError: If it was learnt at another depth or by other code, or cannot
                be true; nothing has changed then.
        """
        if not state:
            return
        check_version(state)
        # Copies first: a state that is refused half-way must leave nothing behind.
        for acceptance, cost in (
            copy.deepcopy((self.acceptance, self.cost)),
            (self.acceptance, self.cost),
        ):
            acceptance.import_state(state)
            cost.import_state(read_part(state, "cost"))


def _normalise(weights: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Scale to mean 1, so that the worth of a millisecond keeps its meaning."""
    return None if weights is None else weights / weights.mean()
