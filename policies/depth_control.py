"""Choosing the depth step by step: when to plan anew, by what, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.depth import plan_depth
from policies.decisions.early_exit import EarlyExitRule
from policies.decisions.recent_drafts import RecentDrafts
from policies.exploration import EXPLORE_DEPTH, DrafterBacklog, Exploration

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from policies.decisions.depth import DepthEstimate, DepthPlan
    from policies.decisions.draft_costs import DraftCosts
    from policies.estimators.draft_acceptance import DraftAcceptance
    from policies.types import EngineLimits, StepTiming

REPLAN_EVERY = 8
"""Steps between two looks at recent drafts, and between two choices of the depth at an
unchanged load."""

SAME_LOAD = 16
"""A change by fewer than one request in this many is no reason to plan anew."""

KEEP_DEPTH_GAIN = 1.01
"""What a new depth must promise over the current one: estimates move by about a per
cent from step to step, and flapping has a price."""


@dataclass(slots=True)
class Cadence:
    """Says when the depth is due to be chosen anew.

    Attributes:
        num_steps: Steps so far, planned or skipped.
    """

    num_steps: int = 0
    _planned_at: int = field(init=False, default=0)
    _planned_for: tuple[int, float | None] = field(init=False, default=(0, None))

    def is_due(self) -> bool:
        """Count a step, and tell whether so many have passed; asked once a step."""
        self.num_steps += 1
        if self.num_steps < self._planned_at + REPLAN_EVERY:
            return False
        self._planned_at = self.num_steps
        return True

    def has_changed(self, num_reqs: int, latency_target_ms: float | None) -> bool:
        """Tell whether the load is another one than that of the latest plan."""
        planned_reqs, planned_target_ms = self._planned_for
        change = abs(num_reqs - planned_reqs)
        return latency_target_ms != planned_target_ms or (
            change > 0 and change * SAME_LOAD >= planned_reqs
        )

    def note_plan(self, num_reqs: int, latency_target_ms: float | None) -> None:
        """Keep what the latest plan was made for."""
        self._planned_for = (num_reqs, latency_target_ms)


@dataclass(slots=True)
class DepthControl:
    """Chooses the depth, now and then anew, and when a draft may end short of it.

    Attributes:
        limits: The engine's.
        costs: Under the latest plan, which this replaces.
        acceptance: Of drafts.
        recent: Drafts that stand for the next ones.
        latency_target_ms: Longest step, or None.
        exploration: Steps that are not the best guess.
        backlog: What a drafter that was skipped has missed.
        cadence: When to plan anew.
    """

    limits: EngineLimits
    costs: DraftCosts
    acceptance: DraftAcceptance
    recent: RecentDrafts
    latency_target_ms: float | None = None
    exploration: Exploration = field(default_factory=Exploration)
    backlog: DrafterBacklog = field(default_factory=DrafterBacklog)
    cadence: Cadence = field(default_factory=Cadence)
    _estimate: DepthEstimate | None = field(init=False, default=None)
    _has_drafted: bool = field(init=False, default=False)
    _exits_early: bool = field(init=False, default=False)
    _next_acceptance: NDArray[np.float64] = field(init=False)
    _token_price: float = field(init=False, default=0.0)
    _pass_price: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Know no draft yet."""
        self._next_acceptance = np.empty(0)

    @property
    def max_depth(self) -> int:
        """Deepest draft."""
        return self.recent.max_depth

    def choose(self, num_reqs: int, latency_target_ms: float | None) -> int:
        """Choose the depth with the best expected goodput for `num_reqs` requests.

        Args:
            num_reqs: Requests that decode; without any the plan stays.
            latency_target_ms: The tightest time per token any of them wants, or None.
        """
        if num_reqs < 1:
            return self.costs.plan.depth
        is_due = self.cadence.is_due()
        if (is_due and self._has_drafted) or self._estimate is None:
            self._look_ahead()
        if is_due or self.cadence.has_changed(num_reqs, latency_target_ms):
            self._plan(num_reqs, latency_target_ms)
        depth = self.exploration.adjust_depth(self.costs.plan.depth, self.max_depth)
        if depth == 0 and self.limits.skips_drafter:
            self.backlog.note_planned(num_reqs)
        exploring = self.exploration.exploring
        if exploring:
            self.acceptance.calibration.age()
        self._exits_early = self.limits.exits_early and depth > 0 and not exploring
        has_target = not (latency_target_ms is None and self.latency_target_ms is None)
        # Without a sample of acceptances nothing would end the draft.
        if self._exits_early and not has_target and self._next_acceptance.size:
            return self.max_depth
        if depth == 1 and self.exploration.is_pass_due():
            self._exits_early = False
            return min(2, self.max_depth)
        return depth

    def early_exit(
        self, req_ids: Sequence[Hashable], weights: NDArray[np.float64] | None
    ) -> EarlyExitRule | None:
        """Return when the coming draft ends, by the latest plan; None at its depth.

        Args:
            req_ids: `[num_reqs]`.
            weights: `[num_reqs]`, mean 1; None where all are alike.
        """
        if not self._exits_early or not self._next_acceptance.size:
            return None
        # A pass that was not timed of late might be cheaper than is believed.
        is_due = self.exploration.is_pass_due()
        return EarlyExitRule(
            req_ids=tuple(req_ids),
            scale=self.acceptance.calibration.scale(req_ids),
            max_depth=min(2, self.max_depth) if is_due else self.max_depth,
            next_acceptance=self._next_acceptance,
            pass_price=0.0 if is_due else self._pass_price,
            token_price=self._token_price,
            weights=weights,
        )

    def note_drafts(
        self,
        acceptance: NDArray[np.float64],
        num_draft_tokens: NDArray[np.int64],
        weights: NDArray[np.float64] | None,
    ) -> None:
        """Take in a step's drafts, as `RecentDrafts.remember`."""
        self.recent.remember(acceptance, num_draft_tokens, weights)
        self._has_drafted = True

    def tokens_by_depth(self) -> NDArray[np.float64]:
        """Return what `DepthEstimate.tokens_in_full` is by the latest look."""
        if self._estimate is None:
            self._look_ahead()
        assert self._estimate is not None
        return self._estimate.tokens_in_full

    def note_timing(self, timing: StepTiming) -> None:
        """Take in how deep a finished step drafted, once its costs are learnt."""
        self.exploration.note_passes(timing.depth)

    def note_finished(self, timing: StepTiming) -> None:
        """Take in at once what a finished step left out, which no clock says."""
        if self.limits.skips_drafter:
            self.backlog.note(timing)

    def best_fixed(self, num_reqs: int) -> int:
        """Return the depth of most goodput where everything drafted is verified."""
        estimate = self.recent.estimate_depths(self.acceptance.typical())
        costs, skips_drafter = self.costs, self.limits.skips_drafter
        prompt_ms = costs.cost.prompts.more_ms(costs.cost.target, num_reqs)
        step_ms = costs.estimate_ms(
            estimate, num_reqs, prompt_ms, skips_drafter=skips_drafter
        )
        goodput = estimate.tokens_in_full[1:] / step_ms[1:, -1]
        return 1 + int(np.argmax(goodput))

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about."""
        self.cadence.num_steps += num_steps
        self.exploration.note_skipped_steps(num_steps)
        if self.limits.skips_drafter:
            self.backlog.note_skipped_steps(num_steps)

    def _look_ahead(self) -> None:
        """Let recent drafts stand for the next ones; too dear for every step."""
        self._has_drafted = False
        self._next_acceptance = self.recent.sample_acceptance()
        self._estimate = self.recent.estimate_depths(
            self.acceptance.typical(), self._next_acceptance
        )

    def _plan(self, num_reqs: int, latency_target_ms: float | None) -> None:
        self.cadence.note_plan(num_reqs, latency_target_ms)
        costs = self.costs
        costs.plan = self._compare_depths(num_reqs, latency_target_ms)
        self._token_price = costs.token_price(num_reqs)
        self._pass_price = costs.pass_price(num_reqs)
        if costs.plan.depth == 0:
            self._cost_exploring(num_reqs, latency_target_ms)

    def _compare_depths(
        self, num_reqs: int, latency_target_ms: float | None
    ) -> DepthPlan:
        """Compare all depths at the present load, by recent drafts and costs."""
        estimate, costs = self._estimate, self.costs
        assert estimate is not None
        skips_drafter = self.limits.skips_drafter
        prompt_ms = costs.cost.prompts.more_ms(costs.cost.target, num_reqs)
        step_ms = costs.estimate_ms(
            estimate, num_reqs, prompt_ms, skips_drafter=skips_drafter
        )
        if skips_drafter and costs.plan.depth == 0:
            step_ms[1:] += self.backlog.share_ms(costs.cost)
        max_step_ms = None
        if not (self.latency_target_ms is None and latency_target_ms is None):
            # Prompts are fitted into what a target leaves (`choose_prefill_tokens`): as
            # a reason to draft less they would get ever more of it. So is the drafter's
            # pass over them, which is part of what drafting costs.
            pass_ms = np.zeros((step_ms.shape[0], 1))
            pass_ms[int(skips_drafter) :] = costs.cost.prompts.more_ms(
                costs.cost.draft_first, num_reqs
            )
            max_step_ms = pass_ms + self._limit_ms(
                estimate, step_ms - pass_ms, num_reqs, latency_target_ms
            )
        return plan_depth(
            estimate,
            step_ms,
            num_reqs,
            costs.plan.depth,
            keep_gain=KEEP_DEPTH_GAIN,
            max_step_ms=max_step_ms,
            prompt_ms=prompt_ms,
        )

    def _limit_ms(
        self,
        estimate: DepthEstimate,
        step_ms: NDArray[np.float64],
        num_reqs: int,
        latency_target_ms: float | None,
    ) -> NDArray[np.float64] | float:
        """Return the longest step that the targets bear, by plan or for all."""
        limit_ms = np.inf if self.latency_target_ms is None else self.latency_target_ms
        if latency_target_ms is None:
            return limit_ms
        # One request can have all its drafts where so many are verified.
        depths = np.arange(estimate.verified.shape[0])[:, None]
        tokens = np.where(
            num_reqs * estimate.verified >= depths,
            estimate.tokens_in_full[:, None],
            1.0 + estimate.gained,
        )
        both_ms = np.minimum(latency_target_ms * tokens, limit_ms)
        # A target that no depth can meet must not cost the others theirs.
        return both_ms if (step_ms <= both_ms).any() else limit_ms

    def _cost_exploring(self, num_reqs: int, latency_target_ms: float | None) -> None:
        costs, skips_drafter = self.costs, self.limits.skips_drafter
        targets_ms = (self.latency_target_ms, latency_target_ms)
        self.exploration.set_cost(
            explore_ms=costs.explore_ms(
                num_reqs, EXPLORE_DEPTH, skips_drafter=skips_drafter
            ),
            step_ms=costs.plain_ms(num_reqs, skips_drafter=skips_drafter),
            backlog_ms=self.backlog.fill_ms(costs.cost),
            max_step_ms=min((ms for ms in targets_ms if ms is not None), default=None),
        )
