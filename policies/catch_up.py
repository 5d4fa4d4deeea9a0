"""What a drafter that was skipped has missed, and what making up for it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.estimators.step_cost import StepCost, StepTiming

RESUME_HORIZON_STEPS = 40
"""Steps over which catching up after cold depth 0 is paid off: as long as the load that
made drafting worthwhile is expected to last."""


@dataclass(slots=True)
class CatchUp:
    """Positions of the running requests that lack the drafter's KV.

    Only where the engine skips the drafter at depth 0; elsewhere nothing is missing.

    Attributes:
        num_missing: Positions over all running requests.
    """

    num_missing: int = 0

    def note(self, timing: StepTiming) -> None:
        """Take in a step of an engine that skips its drafter at depth 0."""
        if timing.depth > 0:
            self.num_missing = 0
            return
        # Requests that end take their share of the missing positions along.
        self.num_missing = min(
            self.num_missing + timing.num_tokens, timing.num_context_tokens
        )

    def price_ms(self, cost: StepCost) -> float:
        """Price filling all of them at once, as the first drafting step does."""
        return cost.draft_first.at(self.num_missing)

    def share_ms(self, cost: StepCost) -> float:
        """Price the same as a share of each of the steps that pay it off."""
        return self.price_ms(cost) / RESUME_HORIZON_STEPS
