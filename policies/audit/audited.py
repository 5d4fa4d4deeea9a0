"""A planner that finds out what another one gains, and holds it back where it loses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.audit.block import Block, Neighbours, SeenStep
from policies.audit.gain import estimate_cost, report_gains
from policies.audit.holding import MIN_RUN, Holding
from policies.audit.ledger import Ledger
from policies.audit.schedule import BLOCK_STEPS, AuditSchedule
from policies.planner import Planner
from policies.types import DraftSelection, VerificationOutcome

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from policies.audit.block import Arm
    from policies.decisions.batching import BatchPlan, EngineLoad
    from policies.decisions.early_exit import EarlyExitRule
    from policies.types import (
        AcceptanceScale,
        CostProfile,
        DraftBatch,
        StepTiming,
    )

_NOTHING = VerificationOutcome(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(slots=True)
class _Step:
    """A step that was planned and has not been timed yet.

    Attributes:
        block: Whose it is, None for the policy's.
        is_measured: Whether all of it is the block's.
        is_held: Whether depth was held at 0.
    """

    num_reqs: int
    depth: int
    block: Block | None = None
    is_measured: bool = False
    is_held: bool = False
    num_accepted: int = 0

    @property
    def tokens(self) -> float:
        """Emitted per request."""
        return 1.0 + self.num_accepted / self.num_reqs


@dataclass(slots=True)
class AuditedPlanner(Planner):
    """Passes everything on, but for a small share of steps that it chooses by luck.

    In a block of these nothing is drafted, or the best fixed length is, if the policy
    knows one. Of `none` only the time has to be found out: it emits a token per request
    and step. Blocks are compared with the policy's own steps around them.

    For engines whose steps do not overlap: `observe_timing` is about the step whose
    depth was chosen last, or the last that was skipped.

    Attributes:
        inner: The policy.
        schedule: When blocks begin.
        ledger: What has been found out.
        holding: Where speculation is held back.
        num_unmatched: Blocks that had too few steps like theirs on either side.

    Source: ours.
    """

    inner: Planner
    schedule: AuditSchedule
    ledger: Ledger = field(default_factory=Ledger)
    holding: Holding = field(default_factory=Holding)
    num_unmatched: int = 0
    _neighbours: Neighbours = field(default_factory=Neighbours)
    _block: Block | None = None
    _step: _Step | None = None
    _is_held: bool = False
    _run: int = 0
    _num_skipped: int = 0
    _has_news: bool = True
    _found: dict[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return what only this policy has."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit what the policy does, or what the block or the holding says."""
        if self._block is None and not self._is_held:
            return self.inner.select(batch)
        most = 0 if self._block is None else self._block.draft_tokens
        admitted = np.minimum(batch.num_draft_tokens, most)
        return DraftSelection(admitted, draft_budget=int(admitted.sum()))

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        """Draft as the policy does, or as the block or the holding says."""
        if num_reqs < 1:
            return self.inner.choose_depth(num_reqs, latency_target_ms)
        self._close_untimed()
        trial = self.holding.visit(num_reqs)
        is_due = self.schedule.is_due(is_trial=trial.is_open)
        self._hold(trial.hold_steps > 0 or (self._is_held and trial.passes_by))
        trial.spend(1)
        if self._block is None and is_due and self._run >= MIN_RUN:
            self._begin_block(num_reqs, is_trial=trial.is_open)
        block = self._block
        if block is not None and block.num_begun < BLOCK_STEPS:
            depth = block.draft_tokens
            is_measured = block.num_begun > 0
            self._step = _Step(num_reqs, depth, block, is_measured=is_measured)
            block.num_begun += 1
            return depth
        if block is not None:
            self._block = None
            self._neighbours.end(block)
        elif self._is_held:
            self._step = _Step(num_reqs, 0, is_held=True)
            return 0
        depth = self.inner.choose_depth(num_reqs, latency_target_ms)
        self._step = _Step(num_reqs, depth, block)
        return depth

    def early_exit(
        self,
        req_ids: Sequence[Hashable],
        weights: NDArray[np.float64] | None = None,
    ) -> EarlyExitRule | None:
        """Return the policy's rule; a block drafts to its depth."""
        if self._block is not None or self._is_held:
            return None
        return self.inner.early_exit(req_ids, weights)

    def observe(self, outcome: VerificationOutcome) -> None:
        """Count what was emitted; the policy is not told what a block verified."""
        step = self._step
        if step is None:
            self.inner.observe(outcome)
            return
        # Before it sleeps an engine takes an empty step, which takes nothing back.
        step.num_accepted += sum(outcome.num_accepted.tolist()) + outcome.num_unlearnt
        is_own = step.block is None or step.block.num_begun == 1
        self.inner.observe(outcome if is_own else _NOTHING)

    def observe_timing(self, timing: StepTiming) -> None:
        """Enter what a step took, and tell the policy."""
        self._close(timing)
        self.inner.observe_timing(timing)

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about."""
        self._num_skipped = num_steps
        if self._step is not None:
            self.holding.at(self._step.num_reqs).spend(num_steps)
        self.inner.note_skipped_steps(num_steps)

    def fit_profile(self, profile: CostProfile) -> None:
        """Pass on."""
        self.inner.fit_profile(profile)

    def acceptance_scale(self, req_ids: Sequence[Hashable]) -> AcceptanceScale | None:
        """Pass on."""
        return self.inner.acceptance_scale(req_ids)

    def best_fixed(self, num_reqs: int) -> int | None:
        """Pass on."""
        return self.inner.best_fixed(num_reqs)

    def forget(self, req_id: Hashable) -> None:
        """Pass on."""
        self.inner.forget(req_id)

    def plan_batch(self, load: EngineLoad) -> BatchPlan | None:
        """Pass on, with what the policy does not know: whether it is held back."""
        if self._is_held:
            load = replace(load, is_held_back=True)
        return self.inner.plan_batch(load)

    def pause(self) -> None:
        """Settle what can be: another planner is in charge of the steps that follow.

        Between two steps, before these. A block under way is given up, and the steps
        after the pause are no neighbours of those before it.
        """
        self._close_untimed()
        self.num_unmatched += self._block is not None
        self._settle(self._neighbours.stop_waiting())
        self._neighbours, self._block, self._run = Neighbours(), None, 0

    def export_state(self) -> dict[str, Any]:
        """Pass on: what was gained here says nothing of another machine."""
        return self.inner.export_state()

    def import_state(self, state: dict[str, Any]) -> None:
        """Pass on."""
        self.inner.import_state(state)

    def report(self) -> dict[str, float]:
        """Return the policy's gauges, and what has been found out.

        `speculation_gain_none`, `..._lower` and `..._upper`, likewise of `best_fixed`,
        where they can be told; `num_audited_...` blocks of each; `audited_step_share`;
        `audit_cost_share` of the time; `speculation_held`, 1 or 0.
        """
        loads = self.ledger.total()
        num_steps = sum(sums.num_steps for sums in loads.values())
        num_audited = sum(sums.num_audited for sums in loads.values())
        gauges = {
            "audited_step_share": num_audited / num_steps if num_steps else 0.0,
            "audit_cost_share": estimate_cost(loads),
            "speculation_held": float(self._is_held),
            "num_unmatched_audits": self.num_unmatched,
        }
        if self._has_news:
            self._has_news = False
            self._found = report_gains(loads, self.ledger.blocks)
        return self.inner.report() | gauges | self._found

    def _hold(self, is_held: bool) -> None:
        if self._block is not None or is_held == self._is_held:
            return
        self._is_held, self._run = is_held, 0
        self._settle(self._neighbours.stop_waiting())

    def _begin_block(self, num_reqs: int, *, is_trial: bool) -> None:
        # A trial asks one question only.
        arm: Arm = "none"
        draft_tokens = None
        if not is_trial and self.schedule.rng.random() < 0.5:
            draft_tokens = self.inner.best_fixed(num_reqs)
        if draft_tokens is not None:
            arm = "best_fixed"
        self._settle(self._neighbours.stop_waiting())
        self._block = Block(arm, draft_tokens or 0, self._neighbours.before())

    def _settle(self, block: Block | None) -> None:
        if block is None:
            return
        result = block.settle(self.ledger.now_s)
        if result is None:
            self.num_unmatched += 1
            return
        self.ledger.blocks.append(result)
        self._has_news = True
        if result.arm == "none":
            loads = self.ledger.since_start(result.num_reqs)
            self.holding.note_block(result, loads)

    def _close_untimed(self) -> None:
        """Enter a step of the policy's that the engine slept after."""
        step, self._step, self._num_skipped = self._step, None, 0
        if step is not None and step.block is None and step.depth:
            self.ledger.add_untimed(step.num_reqs, step.tokens)

    def _close(self, timing: StepTiming) -> None:
        step, self._step = self._step, None
        num_skipped, self._num_skipped = self._num_skipped, 0
        target_ms = timing.target_ms + timing.sample_ms + timing.host_ms
        drafter_ms = timing.draft_first_ms + timing.draft_next_ms + timing.backlog_ms
        ms = target_ms + drafter_ms
        if step is None or not (0.0 < ms < math.inf and timing.num_reqs):
            return
        num_prompt = timing.num_prefill_tokens
        width = timing.num_reqs + timing.num_drafts + num_prompt
        seen = SeenStep(timing.num_reqs, ms, step.tokens, num_prompt, target_ms, width)
        if step.block is not None:
            self.ledger.add_audited(seen)
            is_plain = step.block.arm == "none"
            # A watchdog's tries are verified in spite of the block. That something is
            # drafted disturbs nothing: some drafters run along in every step.
            is_disturbed = is_plain and timing.num_drafts > 0
            if step.is_measured and not is_disturbed:
                # What its passes take is not what none takes.
                own = seen._replace(ms=target_ms) if is_plain else seen
                step.block.measured.append(own)
        elif step.is_held or not (timing.depth or timing.num_drafts):
            self._run = 0
            self.ledger.add_rest(seen, 1 + num_skipped)
        else:
            self.ledger.add_policy(seen, timing.draft_first_ms)
            # The first of a run catches up with what the drafter missed in the rest.
            if self._run:
                self._settle(self._neighbours.add(seen))
            self._run += 1
