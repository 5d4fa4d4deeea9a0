"""What a planner answers to questions that its policy does not ask itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from policies.decisions.batching import BatchPlan, EngineLoad
    from policies.decisions.early_exit import DraftStop
    from policies.estimators.step_cost import CostProfile, StepTiming
    from policies.types import AcceptanceScale


class PlannerDefaults:
    """Answers of a policy that has no opinion."""

    __slots__ = ()

    def observe_timing(self, timing: StepTiming) -> None:
        """Ignore what steps cost."""

    def fit_profile(self, profile: CostProfile) -> None:
        """Ignore what forward passes cost."""

    def acceptance_scale(
        self,
        req_ids: Sequence[Hashable],  # noqa: ARG002 - Planner protocol
    ) -> AcceptanceScale | None:
        """Rank by confidence itself."""
        return None

    def draft_stop(
        self,
        req_ids: Sequence[Hashable],  # noqa: ARG002 - Planner protocol
        weights: NDArray[np.float64] | None = None,  # noqa: ARG002 - likewise
    ) -> DraftStop | None:
        """Draft to the depth."""
        return None

    def rest(self, num_steps: int) -> None:
        """Count no steps."""

    def forget(self, req_id: Hashable) -> None:
        """Know nothing about single requests."""

    def plan_batch(self, load: EngineLoad) -> BatchPlan | None:  # noqa: ARG002
        """Leave the engine's own limits."""
        return None

    def report(self) -> dict[str, float]:
        """Report nothing."""
        return {}

    def export_state(self) -> dict[str, Any]:
        """Have nothing to hand on."""
        return {}

    def import_state(self, state: dict[str, Any]) -> None:
        """Have nothing to take over."""
