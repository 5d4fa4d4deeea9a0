"""Planners: the one object an engine adapter asks before and tells after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from policies.decisions.select import compute_survival, select_drafts
from policies.defaults import PlannerDefaults
from policies.dynamic import DynamicPlanner
from policies.estimators.acceptance import PositionAcceptance
from policies.goodput import GoodputPlanner
from policies.types import (
    AcceptanceScale,
    DraftBatch,
    DraftSelection,
    EngineLimits,
    PolicySpec,
    VerificationOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import NDArray

    from policies.decisions.batching import BatchPlan, EngineLoad
    from policies.decisions.early_exit import DraftStop
    from policies.estimators.step_cost import CostProfile, StepTiming


class Planner(Protocol):
    """Decides for one engine; it keeps state only where it learns."""

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Choose the drafts to verify in the coming step."""
        ...

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        """Choose how many tokens each request drafts after the coming step.

        `latency_target_ms` is the tightest time per token that a running request
        wants; None where none does.
        """
        ...

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn from a finished step what was accepted."""
        ...

    def observe_timing(self, timing: StepTiming) -> None:
        """Learn from a finished step what it cost."""
        ...

    def fit_profile(self, profile: CostProfile) -> None:
        """Take in forward passes timed at start-up."""
        ...

    def acceptance_scale(self, req_ids: Sequence[Hashable]) -> AcceptanceScale | None:
        """Return how confidence becomes acceptance; None ranks by confidence itself.

        Asked by engines that rank drafts on the device.
        """
        ...

    def draft_stop(
        self,
        req_ids: Sequence[Hashable],
        weights: NDArray[np.float64] | None = None,
    ) -> DraftStop | None:
        """Return when the coming draft may end early; None drafts to its depth.

        Asked after `choose_depth`, by engines that can look at a draft between passes.
        `weights` are those of the requests, > 0; None where all are alike.
        """
        ...

    def rest(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about.

        Engines that can leave their drafter out go on at depth 0 for some steps while
        the same requests run, and say here how many they were before they ask again.
        """
        ...

    def forget(self, req_id: Hashable) -> None:
        """Drop what is known about a finished request."""
        ...

    def plan_batch(self, load: EngineLoad) -> BatchPlan | None:
        """Choose limits for the coming step; None leaves the engine's own."""
        ...

    def report(self) -> dict[str, float]:
        """Return gauges for telemetry."""
        ...

    def export_state(self) -> dict[str, Any]:
        """Return what a new replica can start from; {} if nothing was learnt."""
        ...

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another planner's `export_state`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPlanner(PlannerDefaults):
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
        num_reqs: int,  # noqa: ARG002 - Planner protocol
        latency_target_ms: float | None = None,  # noqa: ARG002 - likewise
    ) -> int:
        """Return the constant draft length."""
        return self.draft_tokens

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn nothing."""


@dataclass(slots=True)
class TetrisPlanner(PlannerDefaults):
    """Constant capacity per request, spent where survival is largest.

    The budget of a step is `draft_tokens` times the requests with drafts, exactly
    what `fixed` would verify; drafting goes `extra_draft_tokens` deeper.

    Source: arXiv 2502.15197, section 4. Ours: confidence is the largest probability
    of the draft distribution instead of the drawn token's, which keeps sampled
    drafts lossless and is the same number for argmax drafts; drafts without
    confidence use a learnt per-position estimate.
    """

    draft_tokens: int
    extra_draft_tokens: int
    _positions: PositionAcceptance = field(init=False)

    def __post_init__(self) -> None:
        """Create the estimator for drafts without confidence."""
        self._positions = PositionAcceptance(
            max(1, self.draft_tokens + self.extra_draft_tokens)
        )

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit the `draft_tokens * num_reqs` drafts most likely to survive."""
        num_drafting = int(np.count_nonzero(batch.num_draft_tokens))
        draft_budget = self.draft_tokens * num_drafting
        return DraftSelection(
            num_admitted=select_drafts(
                self._survival(batch), batch.num_draft_tokens, draft_budget
            ),
            draft_budget=draft_budget,
        )

    def choose_depth(
        self,
        num_reqs: int,  # noqa: ARG002 - Planner protocol
        latency_target_ms: float | None = None,  # noqa: ARG002 - likewise
    ) -> int:
        """Return capacity plus the extra draft tokens."""
        return self.draft_tokens + self.extra_draft_tokens

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


_BUILDERS: dict[str, Callable[[PolicySpec, EngineLimits], Planner]] = {
    "fixed": lambda spec, _: FixedPlanner(spec.draft_tokens),
    "tetris": lambda spec, _: TetrisPlanner(spec.draft_tokens, spec.extra_draft_tokens),
    "dynamic": lambda spec, limits: DynamicPlanner(spec.draft_tokens, limits),
    "goodput": lambda spec, limits: GoodputPlanner(
        spec.draft_tokens, limits, spec.latency_target_ms
    ),
}

POLICY_NAMES: tuple[str, ...] = ("none", *_BUILDERS)
"""What configuration may name; `none` starts the engine without a drafter."""


def build_planner(spec: PolicySpec, limits: EngineLimits | None = None) -> Planner:
    """Build the planner a specification names.

    Args:
        spec: The policy and its numbers.
        limits: The engine's; defaults suit tests and simulations.

    Raises:
        ValueError: If the name is unknown or has no planner, or a number is out of
            range.
    """
    if spec.draft_tokens < 1:
        raise ValueError(f"draft_tokens must be >= 1, got {spec.draft_tokens}")
    if spec.extra_draft_tokens < 0:
        raise ValueError(
            f"extra_draft_tokens must be >= 0, got {spec.extra_draft_tokens}"
        )
    try:
        build = _BUILDERS[spec.name]
    except KeyError:
        raise ValueError(
            f"policy {spec.name!r} has no planner; choose one of {sorted(_BUILDERS)}"
        ) from None
    return build(spec, limits or EngineLimits())
