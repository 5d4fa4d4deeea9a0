"""The paper's own combinations, as arms of its experiments; nothing else needs them.

Source: arXiv 2502.15197, and its reference implementation's options `--tetris`,
`--tetris-extra-proposals`, `--tetris-turn-on-batch-size` and `--dsd`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.baselines import DynamicPlanner, TetrisPlanner
from policies.planner import Planner
from policies.types import DraftSelection

if TYPE_CHECKING:
    from policies.types import (
        CostProfile,
        DraftBatch,
        EngineLimits,
        StepTiming,
        VerificationOutcome,
    )

DECIDE_EVERY = 20
"""Steps between two lengths of DSD, as in the reference implementation."""


class PaperPlanner(Planner):
    """A length from outside or from DSD, extra drafts, and TETRIS's selection.

    DSD learns its acceptance from what TETRIS selected. The reference implementation
    learns nothing then, which leaves the length where it began.
    """

    def __init__(
        self,
        max_depth: int,
        limits: EngineLimits,
        *,
        draft_tokens: int = 0,
        extra: int = 1,
        turn_on_batch_size: int = 2,
    ) -> None:
        """Create the parts.

        Args:
            max_depth: The longest draft, the extra tokens included.
            limits: The engine's.
            draft_tokens: k; 0 leaves it to DSD.
            extra: E, tokens drafted beyond k; with none DSD is by itself.
            turn_on_batch_size: With fewer requests there is neither an extra draft nor
                a selection.

        Raises:
            ValueError: If a number makes no sense.
        """
        if not 0 <= draft_tokens <= max_depth - extra or extra < 0:
            raise ValueError(
                f"draft_tokens {draft_tokens} and extra {extra} must be >= 0 and fit "
                f"into max_draft_tokens {max_depth}"
            )
        self._extra, self._turn_on = extra, turn_on_batch_size
        self._dsd = None
        if draft_tokens == 0:
            self._dsd = DynamicPlanner(max(1, max_depth - extra), limits)
        self._length = draft_tokens or 1
        self._tetris = TetrisPlanner(self._length, max_depth)
        self._steps_left = 0

    def select(self, batch: DraftBatch) -> DraftSelection:
        """Admit k drafts a request on average, those most likely to survive."""
        if batch.num_reqs >= self._turn_on:
            self._tetris.draft_tokens = self._length
            return self._tetris.select(batch)
        num_admitted = batch.num_draft_tokens
        return DraftSelection(num_admitted, int(num_admitted.sum()))

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        """Return k, and E more where there are requests enough."""
        if self._dsd is not None and self._steps_left <= 0:
            self._length = self._dsd.choose_depth(num_reqs, latency_target_ms)
            self._steps_left = DECIDE_EVERY
        self._steps_left -= 1
        extra = self._extra if num_reqs >= self._turn_on and self._length else 0
        return self._length + extra

    def observe(self, outcome: VerificationOutcome) -> None:
        """Learn what was accepted."""
        self._tetris.observe(outcome)
        if self._dsd is not None:
            self._dsd.observe(outcome)

    def observe_timing(self, timing: StepTiming) -> None:
        """Learn what steps cost, if DSD has to know."""
        if self._dsd is not None:
            self._dsd.observe_timing(timing)

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 that nobody asked about, likewise."""
        self._steps_left -= num_steps
        if self._dsd is not None:
            self._dsd.note_skipped_steps(num_steps)

    def fit_profile(self, profile: CostProfile) -> None:
        """Take in what was timed at start-up, likewise."""
        if self._dsd is not None:
            self._dsd.fit_profile(profile)
