"""The policies that `goodput` is compared with: fixed, tetris, dynamic."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.decisions.select import compute_survival, select_drafts
from policies.estimators.acceptance import PositionAcceptance
from policies.estimators.state import (
    STATE_VERSION,
    check_version,
    read_number,
    read_part,
)
from policies.estimators.step_cost import MIN_STEPS_TO_EXPORT, StepCost
from policies.exploration import DrafterBacklog, Exploration
from policies.planner import Planner
from policies.types import DraftSelection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.types import (
        CostProfile,
        DraftBatch,
        EngineLimits,
        StepTiming,
        VerificationOutcome,
    )

PRIOR_ACCEPTANCE_RATE = 0.7
"""Start of the moving average, as in the reference implementation."""

SMOOTHING = 0.15
"""Weight of the newest step in the moving average."""

ACCEPTANCE_RANGE = (0.01, 0.99)


@dataclass(frozen=True, slots=True)
class FixedPlanner(Planner):
    """Verify everything that was drafted: plain speculative decoding.

    The baseline every other policy is compared with, and what they fall back to.
    """

    draft_tokens: int

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit every draft."""
        return DraftSelection(
            num_admitted=batch.num_draft_tokens,
            draft_budget=int(batch.num_draft_tokens.sum()),
        )

    def choose_depth(
        self,
        num_reqs: int,  # noqa: ARG002 - as in Planner
        latency_target_ms: float | None = None,  # noqa: ARG002 - likewise
    ) -> int:
        """Return the constant draft length."""
        return self.draft_tokens

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn nothing."""


@dataclass(slots=True)
class TetrisPlanner(Planner):
    """Constant capacity per request, spent where survival is largest.

    The budget of a step is `draft_tokens` times the requests with drafts, exactly
    what `fixed` would verify; drafting goes on to `max_draft_tokens`.

    Source: arXiv 2502.15197, section 4. Ours: confidence is the largest probability
    of the draft distribution instead of the drawn token's, which keeps sampled
    drafts lossless and is the same number for argmax drafts; drafts without
    confidence use a learnt per-position estimate.
    """

    draft_tokens: int
    max_draft_tokens: int
    _positions: PositionAcceptance = field(init=False)

    def __post_init__(self) -> None:
        """Create the estimator for drafts without confidence."""
        self._positions = PositionAcceptance(max(1, self.max_draft_tokens))

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit the `draft_tokens * num_reqs` drafts most likely to survive."""
        num_drafting = int(np.count_nonzero(batch.num_draft_tokens))
        draft_budget = self.draft_tokens * num_drafting
        return DraftSelection(
            num_admitted=select_drafts(
                self._survival(batch), batch.num_draft_tokens, draft_budget
            ),
            draft_budget=draft_budget,
            may_reallocate=True,
        )

    def choose_depth(
        self,
        num_reqs: int,  # noqa: ARG002 - as in Planner
        latency_target_ms: float | None = None,  # noqa: ARG002 - likewise
    ) -> int:
        """Return the constant draft length."""
        return self.max_draft_tokens

    def observe(self, outcome: VerificationOutcome) -> None:
        """Update the per-position acceptance estimate."""
        self._positions.observe(outcome)

    def _survival(self, batch: DraftBatch) -> NDArray[np.float64]:
        if batch.confidence is not None:
            return compute_survival(batch.confidence)
        per_position = self._positions.estimate()[None, : batch.max_depth]
        return np.broadcast_to(
            compute_survival(per_position), (batch.num_reqs, per_position.shape[1])
        )


@dataclass(slots=True)
class DynamicPlanner(Planner):
    """Draft and verify the same k for every request; k follows load and acceptance.

    Expected tokens per request at length k with acceptance rate a are
    `(1 - a^(k+1)) / (1 - a)`; k maximises their sum over the predicted step time.
    Step times come from the same learnt cost model as `goodput`'s, and at length 0 it
    drafts one token as rarely as that does, so that the two differ in the decision
    alone.

    Source: SmartSpec / DSD, arXiv 2406.14066.
    """

    max_depth: int
    limits: EngineLimits
    cost: StepCost = field(init=False)
    _acceptance_rate: float = field(init=False, default=PRIOR_ACCEPTANCE_RATE)
    _depth: int = field(init=False, default=1)
    _exploration: Exploration = field(init=False, default_factory=Exploration)
    _backlog: DrafterBacklog = field(init=False, default_factory=DrafterBacklog)
    _context_per_req: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Start from the prior costs."""
        self.cost = StepCost(
            self.limits.max_tokens, self.limits.max_reqs, self.limits.padded_sizes
        )

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit everything: the length was chosen before drafting."""
        return DraftSelection(
            num_admitted=batch.num_draft_tokens,
            draft_budget=int(batch.num_draft_tokens.sum()),
        )

    def choose_depth(
        self,
        num_reqs: int,
        latency_target_ms: float | None = None,  # noqa: ARG002 - as in Planner
    ) -> int:
        """Return the length with the best expected goodput for `num_reqs` requests."""
        if num_reqs < 1:
            return self._depth
        lengths = np.arange(self.max_depth + 1, dtype=np.float64)
        drafting = (lengths > 0) if self.limits.skips_drafter else np.ones_like(lengths)
        rate = self._acceptance_rate
        tokens = num_reqs * np.cumsum(rate**lengths)
        num_target_tokens: NDArray[np.float64] = num_reqs * (1.0 + lengths)
        prompts = self.cost.prompts
        step_ms = (
            prompts.pass_ms(self.cost.target, num_target_tokens)
            + prompts.pass_ms(self.cost.draft_first, num_target_tokens) * drafting
            + self.cost.context_ms(self._context_per_req * num_reqs)
            + self.cost.sampling.predict_ms(num_reqs, num_reqs * lengths)
            + np.maximum(lengths - 1, 0) * self.cost.draft_next.predict(float(num_reqs))
            + self.cost.host_ms(num_reqs)
            - prompts.more_ms(self.cost.target, num_reqs)
        )
        if self._depth == 0:
            self._exploration.set_cost(
                float(step_ms[1] - step_ms[0]),
                float(step_ms[0]),
                self._backlog.fill_ms(self.cost),
            )
            step_ms[1:] += self._backlog.share_ms(self.cost)
        self._depth = int(np.argmax(tokens / step_ms))
        depth = self._exploration.adjust_depth(self._depth, max_depth=1)
        if depth == 0 and self.limits.skips_drafter:
            self._backlog.note_planned(num_reqs)
        return depth

    def observe(self, outcome: VerificationOutcome) -> None:
        """Move the acceptance rate towards this step's.

        The rate is conditional: accepted tokens over tokens that had their chance,
        those before and at the first rejection.
        """
        accepted = int(outcome.num_accepted.sum())
        rejected = int(np.count_nonzero(outcome.num_accepted < outcome.num_verified))
        if accepted + rejected == 0:
            return
        rate = accepted / (accepted + rejected)
        self._acceptance_rate += SMOOTHING * (rate - self._acceptance_rate)
        least, most = ACCEPTANCE_RANGE
        self._acceptance_rate = min(max(self._acceptance_rate, least), most)

    def observe_timing(self, timing: StepTiming) -> None:
        """Learn step costs at once; the length looks at no draft."""
        self.cost.observe(timing)
        if self.limits.skips_drafter:
            self._backlog.note(timing)
        self._context_per_req = timing.num_context_tokens / max(timing.num_reqs, 1)

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about."""
        self._exploration.note_skipped_steps(num_steps)
        if self.limits.skips_drafter:
            self._backlog.note_skipped_steps(num_steps)
        self.cost.prompts.skip(num_steps)

    def fit_profile(self, profile: CostProfile) -> None:
        """Start from forward passes timed at start-up instead of from priors."""
        self.cost.fit_profile(profile)

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry."""
        return {"acceptance_rate": self._acceptance_rate, **self.cost.report()}

    def export_state(self) -> dict[str, Any]:
        """Return what a new replica of the same pair can start from."""
        if self.cost.num_steps < MIN_STEPS_TO_EXPORT:
            return {}
        return {
            "version": STATE_VERSION,
            "acceptance_rate": self._acceptance_rate,
            "cost": self.cost.export_state(),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start warm from another planner's `export_state`; {} changes nothing.

        Raises:
            ValueError: If it was learnt by other code or cannot be true; nothing has
                changed then.
        """
        if not state:
            return
        check_version(state)
        least, most = ACCEPTANCE_RANGE
        rate = read_number(state, "acceptance_rate", least=least, most=most)
        # Into a copy: a state that is refused half-way must leave nothing behind.
        cost = copy.deepcopy(self.cost)
        cost.import_state(read_part(state, "cost"))
        self._acceptance_rate, self.cost = rate, cost
