"""The goodput planner: budget, depth and batch that follow live capacity."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.acceptance import PositionAcceptance
from policies.admission import (
    BatchPlan,
    choose_max_running,
    choose_prefill_tokens,
    reserve_blocks,
)
from policies.batch import DraftSelection
from policies.budget import DepthOutlook, DepthPlan, plan_depth
from policies.calibration import ConfidenceCalibration
from policies.catch_up import CatchUp
from policies.cost import MIN_STEPS_TO_TEACH, StepCost
from policies.draft_admission import admit_above_threshold, admit_best, claim
from policies.draft_prices import DraftPrices
from policies.exploration import EXPLORE_DEPTH, Exploration
from policies.feedback import DraftFeedback
from policies.priors import prior_of
from policies.recent import RecentDrafts
from policies.selection import count_admitted
from policies.state import STATE_VERSION, check_version, read_part
from policies.stopping import DraftStop

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from policies.admission import EngineLoad
    from policies.batch import (
        AcceptanceScale,
        DraftBatch,
        EngineLimits,
        VerificationOutcome,
    )
    from policies.cost import CostProfile, StepTiming

REPLAN_EVERY = 8
"""Steps between two looks at recent drafts, and between two choices of the depth at an
unchanged load."""

REPLAN_RESTING_EVERY = 16
"""The same while nothing is drafted: all that moves then is what a step costs."""

LEARN_EVERY = 4
"""Timed steps whose costs are learnt together."""

TEACH_EVERY = range(2, 9)
"""Steps whose outcomes are learnt together, much cheaper than one by one: the fewest,
for a request or two, whose last tokens say most about its next, to the most."""

SAME_LOAD = 16
"""A change by fewer than one request in this many is no reason to plan anew."""

SAME_LOAD_RESTING = 8
"""The same while nothing is drafted."""

REBATCH_EVERY = 16
"""Fewest steps between two choices of how many requests may run."""

KEEP_DEPTH_GAIN = 1.01
"""What a new depth must promise over the current one: estimates move by about a per
cent from step to step, and flapping has a price."""


@dataclass(slots=True)
class GoodputPlanner:
    """Verify a draft token when it is worth the time it costs.

    Each step

    1. predicts, for every depth, the best goodput at this load from recent drafts and
       learnt costs; the best depth is drafted next, its goodput is the price of a
       millisecond (`budget.plan_depth`);
    2. where the engine can, ends the draft after the pass that leaves less to gain
       than the next one costs (`stopping.DraftStop`), however deep that is;
    3. verifies, after what latency-bound requests claim (`claims.claim_drafts`), the
       top drafts by survival times weight up to the count where tokens minus priced
       time is largest (`budget.choose_draft_budget`).

    Sampled drafts are admitted by a survival threshold fixed before the block was
    drawn: admission then depends on nothing but the prefix. What the planner learns
    from a step's clock is used one step later, for the same reason.

    A token counts as its request's weight over the batch's mean.

    Attributes:
        max_depth: Deepest draft.
        limits: The engine's.
        latency_target_ms: Longest step, the time between a request's tokens, or None.

    Source: ours; goodput as in arXiv 2406.14066, selection as in arXiv 2502.15197.
    """

    max_depth: int
    limits: EngineLimits
    latency_target_ms: float | None = None
    calibration: ConfidenceCalibration = field(init=False)
    cost: StepCost = field(init=False)
    _prices: DraftPrices = field(init=False)
    _positions: PositionAcceptance = field(init=False)
    _uses_positions: bool = field(init=False, default=False)
    _recent: RecentDrafts = field(init=False)
    _feedback: DraftFeedback = field(init=False)
    _exploration: Exploration = field(init=False, default_factory=Exploration)
    _forgotten: list[Hashable] = field(init=False, default_factory=list)
    _steps_untaught: int = field(init=False, default=0)
    _steps_planned: int = field(init=False, default=0)
    _replanned_at: int = field(init=False, default=0)
    _rebatch_at: int = field(init=False, default=0)
    _max_running: int = field(init=False, default=0)
    _planned_for: tuple[int, float | None] = field(init=False, default=(0, None))
    _context_per_req: float = field(init=False, default=0.0)
    _catch_up: CatchUp = field(init=False, default_factory=CatchUp)
    _outlook: DepthOutlook | None = field(init=False, default=None)
    _has_drafted: bool = field(init=False, default=False)
    _ends_early: bool = field(init=False, default=False)
    _next_acceptance: NDArray[np.float64] = field(init=False)
    _token_price: float = field(init=False, default=0.0)
    _pass_price: float = field(init=False, default=0.0)
    _pending_timings: list[StepTiming] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Start from the priors, at depth 1: cheap, and it teaches."""
        prior = prior_of(self.limits.method)
        self.calibration = ConfidenceCalibration(
            self.max_depth, prior.intercept, prior.slope
        )
        self.cost = StepCost(
            self.limits.max_tokens, self.limits.max_reqs, self.limits.padded_sizes
        )
        self._prices = DraftPrices(
            self.cost, DepthPlan(depth=1, tokens_per_ms=0.0, budget_per_req=0.0)
        )
        self._positions = PositionAcceptance(self.max_depth, prior.acceptance)
        self._recent = RecentDrafts(self.max_depth)
        self._feedback = DraftFeedback(self.max_depth)
        self._next_acceptance = np.empty(0)

    @property
    def plan(self) -> DepthPlan:
        """The latest plan."""
        return self._prices.plan

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit the drafts that are worth their time at the current goodput."""
        longest = batch.max_depth
        if longest == 0:
            return DraftSelection(batch.num_draft_tokens, draft_budget=0)
        acceptance = self._predict_acceptance(batch)
        if acceptance.shape[0] != batch.num_reqs or acceptance.shape[1] < longest:
            raise ValueError(
                f"drafts of {longest} tokens, acceptance of shape {acceptance.shape}"
            )
        survival: NDArray[np.float64] = acceptance.cumprod(axis=1)
        weights = _normalise(batch.weights)
        num_admitted, num_late = np.zeros_like(batch.num_draft_tokens), 0
        is_probe = self._exploration.is_probing()
        if not is_probe:
            values = survival if weights is None else survival * weights[:, None]
            claimed = claim(batch, survival, self._prices)
            if batch.drafts_are_sampled:
                exploration = self._exploration
                num_admitted, num_late = admit_above_threshold(
                    batch,
                    values,
                    claimed,
                    self._prices,
                    explored=exploration.pick_rows(batch.num_reqs)
                    if exploration.exploring
                    else None,
                )
            else:
                num_admitted, num_late = admit_best(
                    batch,
                    survival,
                    values,
                    claimed,
                    self._prices,
                    latency_target_ms=self.latency_target_ms,
                    explore=self._exploration.exploring,
                )
        self._recent.remember(acceptance, batch.num_draft_tokens, weights)
        self._has_drafted = True
        self._feedback.note(batch)
        draft_budget, expected_accepted = count_admitted(survival, num_admitted)
        return DraftSelection(
            num_admitted=num_admitted,
            draft_budget=draft_budget,
            expected_accepted=expected_accepted,
            num_cut_by_latency=num_late,
            is_probe=is_probe,
        )

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        """Choose the depth with the best expected goodput for `num_reqs` requests.

        `latency_target_ms` is the tightest time per token any of them wants, or None.
        """
        if num_reqs < 1:
            return self.plan.depth
        self._steps_planned += 1
        replan_every = REPLAN_EVERY if self.plan.depth else REPLAN_RESTING_EVERY
        is_due = self._steps_planned >= self._replanned_at + replan_every
        if is_due:
            self._replanned_at = self._steps_planned
        if (is_due and self._has_drafted) or self._outlook is None:
            self._look_ahead()
        if is_due or self._has_changed(num_reqs, latency_target_ms):
            self._planned_for = (num_reqs, latency_target_ms)
            self._prices.plan = self._plan_depth(num_reqs, latency_target_ms)
            self._token_price = self._prices.token_price(num_reqs)
            self._pass_price = self._prices.pass_price(num_reqs)
            if self.plan.depth == 0:
                self._price_exploring(num_reqs, latency_target_ms)
        depth = self._exploration.adjust_depth(self.plan.depth, self.max_depth)
        if self._exploration.exploring:
            self.calibration.age()
        self._ends_early = (
            self.limits.stops_drafts and depth > 0 and not self._exploration.exploring
        )
        has_target = not (latency_target_ms is None and self.latency_target_ms is None)
        # Without a sample of acceptances nothing would end the draft.
        if self._ends_early and not has_target and self._next_acceptance.size:
            return self.max_depth
        if depth == 1 and self._exploration.is_pass_due():
            self._ends_early = False
            return min(2, self.max_depth)
        return depth

    def draft_stop(
        self,
        req_ids: Sequence[Hashable],
        weights: NDArray[np.float64] | None = None,
    ) -> DraftStop | None:
        """Return the price of drafting on, by the latest plan."""
        if not self._ends_early or not self._next_acceptance.size:
            return None
        # A pass that was not timed of late might be cheaper than is believed.
        is_due = self._exploration.is_pass_due()
        return DraftStop(
            req_ids=tuple(req_ids),
            scale=self.calibration.scale(req_ids),
            max_depth=min(2, self.max_depth) if is_due else self.max_depth,
            next_acceptance=self._next_acceptance,
            pass_price=0.0 if is_due else self._pass_price,
            token_price=self._token_price,
            weights=_normalise(weights),
        )

    def plan_batch(self, load: EngineLoad) -> BatchPlan:
        """Choose how many requests run and how much prompt joins the step."""
        if self._steps_planned >= self._rebatch_at:
            self._rebatch_at = self._steps_planned + REBATCH_EVERY
            self._max_running = choose_max_running(
                self.cost,
                self._context_per_req,
                self.limits.max_reqs,
                self.latency_target_ms,
                runs_drafter=not self.limits.skips_drafter,
            )
        is_cold = self.limits.skips_drafter and self.plan.depth == 0
        return BatchPlan(
            max_running=self._max_running,
            max_prefill_tokens=choose_prefill_tokens(
                self.cost,
                load,
                self.limits.max_tokens,
                self.latency_target_ms,
                num_passes=0 if is_cold else max(1, self.plan.depth),
            ),
            reserved_blocks=reserve_blocks(load),
        )

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn, every few steps, acceptance and the costs of the steps before."""
        if self._uses_positions:
            self._positions.observe(outcome)
        self._feedback.observe(outcome)
        if len(self._pending_timings) >= LEARN_EVERY:
            self._learn_costs()
        self._steps_untaught += 1
        teach_after = max(TEACH_EVERY[0], outcome.num_verified.size // 2)
        if self._steps_untaught >= min(teach_after, TEACH_EVERY[-1]):
            self._steps_untaught = 0
            self._feedback.teach(self.calibration)
            self._forget_again()

    def observe_timing(self, timing: StepTiming) -> None:
        """Take in a step's timing; it is learnt from once the next step has finished.

        The step that was timed also drew the drafts that are selected next, so its
        clock readings must not decide about them.
        """
        self._pending_timings.append(timing)

    def fit_profile(self, profile: CostProfile) -> None:
        """Start from forward passes timed at start-up instead of from priors."""
        self.cost.fit_profile(profile)

    def acceptance_scale(self, req_ids: Sequence[Hashable]) -> AcceptanceScale:
        """Return the calibration as numbers for these requests."""
        return self.calibration.scale(req_ids)

    def rest(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about."""
        self._steps_planned += num_steps
        self._exploration.rest(num_steps)
        self.cost.rest(num_steps)

    def forget(self, req_id: Hashable) -> None:
        """Drop what is known about a finished request."""
        self.calibration.forget(req_id)
        self._forgotten.append(req_id)

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry: plan, errors, prices.

        No `calibration_error` where nothing has been calibrated.
        """
        gauges = {
            "expected_goodput_per_s": 1e3 * self.plan.tokens_per_ms,
            "planned_budget_per_req": self.plan.budget_per_req,
            **self.cost.report(),
        }
        error = self.calibration.calibration_error()
        return gauges if error is None else gauges | {"calibration_error": error}

    def export_state(self) -> dict[str, Any]:
        """Return what a new replica of the same pair can start from."""
        if self.cost.num_steps < MIN_STEPS_TO_TEACH:
            return {}
        return {
            "version": STATE_VERSION,
            "calibration": self.calibration.export_state(),
            "positions": self._positions.export_state(),
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
        # Into copies: a state that is refused half-way must leave nothing behind.
        calibration, positions, cost = copy.deepcopy(
            (self.calibration, self._positions, self.cost)
        )
        calibration.import_state(read_part(state, "calibration"))
        positions.import_state(read_part(state, "positions"))
        cost.import_state(read_part(state, "cost"))
        self.calibration, self._positions = calibration, positions
        self.cost = self._prices.cost = cost

    def _forget_again(self) -> None:
        """Drop requests whose last outcomes were learnt after they had ended."""
        for req_id in self._forgotten:
            self.calibration.forget(req_id)
        self._forgotten.clear()

    def _predict_acceptance(self, batch: DraftBatch) -> NDArray[np.float64]:
        if batch.confidence is None:
            self._uses_positions = True
            per_position = self._positions.estimate()[: batch.max_depth]
            return np.broadcast_to(per_position, (batch.num_reqs, per_position.size))
        req_ids = batch.req_ids or tuple(range(batch.num_reqs))
        return self.calibration.predict(batch.confidence, req_ids)

    def _typical_acceptance(self) -> NDArray[np.float64]:
        if self._uses_positions:
            return self._positions.estimate()
        return self.calibration.mean_acceptance(self.max_depth)

    def _has_changed(self, num_reqs: int, latency_target_ms: float | None) -> bool:
        planned_reqs, planned_target_ms = self._planned_for
        change = abs(num_reqs - planned_reqs)
        same_load = SAME_LOAD if self.plan.depth else SAME_LOAD_RESTING
        return latency_target_ms != planned_target_ms or (
            change > 0 and change * same_load >= planned_reqs
        )

    def _look_ahead(self) -> None:
        """Let recent drafts stand for the next ones; too dear for every step."""
        self._has_drafted = False
        self._next_acceptance = self._recent.sample_acceptance()
        self._outlook = self._recent.foresee(
            self._typical_acceptance(), self._next_acceptance
        )

    def _plan_depth(self, num_reqs: int, latency_target_ms: float | None) -> DepthPlan:
        """Compare all depths at the present load, by recent drafts and costs."""
        outlook = self._outlook
        assert outlook is not None
        step_ms = self._prices.outlook_ms(
            outlook,
            num_reqs,
            self._context_per_req,
            skips_drafter=self.limits.skips_drafter,
        )
        if self.limits.skips_drafter and self.plan.depth == 0:
            step_ms[1:] += self._catch_up.share_ms(self.cost)
        max_step_ms = None
        if not (self.latency_target_ms is None and latency_target_ms is None):
            # Prompts are fitted into what a target leaves (`choose_prefill_tokens`): as
            # a reason to draft less they would get ever more of it.
            prompt_ms = self._prices.prompt_ms(outlook, num_reqs)
            limit_ms = self._limit_ms(step_ms - prompt_ms, latency_target_ms)
            max_step_ms = limit_ms + prompt_ms
        return plan_depth(
            outlook,
            step_ms,
            num_reqs,
            self.plan.depth,
            keep_gain=KEEP_DEPTH_GAIN,
            max_step_ms=max_step_ms,
        )

    def _limit_ms(
        self, step_ms: NDArray[np.float64], latency_target_ms: float | None
    ) -> NDArray[np.float64] | float:
        """Return the longest step that the targets bear, by depth or for all."""
        limit_ms = np.inf if self.latency_target_ms is None else self.latency_target_ms
        if latency_target_ms is None:
            return limit_ms
        tokens = self._recent.tokens_by_depth(self._typical_acceptance())
        both_ms = np.minimum(latency_target_ms * tokens[:, None], limit_ms)
        # A target that no depth can meet must not cost the others theirs.
        return both_ms if (step_ms <= both_ms).any() else limit_ms

    def _price_exploring(self, num_reqs: int, latency_target_ms: float | None) -> None:
        prices, skips_drafter = self._prices, self.limits.skips_drafter
        targets_ms = (self.latency_target_ms, latency_target_ms)
        self._exploration.set_price(
            explore_ms=prices.explore_ms(
                num_reqs, EXPLORE_DEPTH, skips_drafter=skips_drafter
            ),
            step_ms=prices.plain_ms(
                num_reqs, self._context_per_req, skips_drafter=skips_drafter
            ),
            catch_up_ms=self._catch_up.price_ms(self.cost),
            max_step_ms=min((ms for ms in targets_ms if ms is not None), default=None),
        )

    def _learn_costs(self) -> None:
        # Before anything can fail, or one malformed timing would stop all learning.
        timings, self._pending_timings = self._pending_timings, []
        self.cost.learn(timings)
        for timing in timings:
            self._exploration.note_passes(timing.depth)
            self._context_per_req = timing.num_context_tokens / max(timing.num_reqs, 1)
            if self.limits.skips_drafter:
                self._catch_up.note(timing)


def _normalise(weights: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Scale to mean 1, so that the price of a millisecond keeps its meaning."""
    return None if weights is None else weights / weights.mean()
