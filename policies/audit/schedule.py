"""When an audited block begins: by counting and luck, never by load or content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BLOCK_STEPS = 4
"""Steps whose drafting is not the policy's; the first still verifies what was drafted
before it, and is not measured."""

STEPS_TOUCHED = BLOCK_STEPS + 1
"""The step that follows drafts as the policy says, but has none of its drafts yet, and
catches up with what the drafter has missed. It is nobody's either."""

MIN_GAP = 20
"""Steps between two blocks at least: those that they are compared with, and more."""

TRIAL_GAP = 45
"""Mean steps between two blocks while it is open whether speculation pays at all."""


@dataclass(slots=True)
class AuditSchedule:
    """Draws the steps at which blocks begin.

    Gaps are geometric above `MIN_GAP`: when the next block comes cannot be told from
    when the last one came, so that nothing periodic is in step with it.

    Attributes:
        share: Of all steps, those that blocks touch, in the long run; > 0.
        rng: Source of luck, seeded.
    """

    share: float
    rng: np.random.Generator
    _steps_left: int = field(init=False)

    def __post_init__(self) -> None:
        """Draw the first: an engine begins with a trial."""
        self.draw(is_trial=True)

    def draw(self, *, is_trial: bool) -> None:
        """Draw how many steps come before the next block."""
        gap = TRIAL_GAP if is_trial else STEPS_TOUCHED / self.share - STEPS_TOUCHED
        beyond = max(1.0, gap - MIN_GAP)
        self._steps_left = MIN_GAP + int(self.rng.geometric(1.0 / beyond))

    def is_due(self, *, is_trial: bool) -> bool:
        """Count a step, and tell whether a block begins with it; then draw the next."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        self.draw(is_trial=is_trial)
        return True
