"""Never worse than no speculation: hold it back where it loses, and try again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.audit.block import BlockResult

MIN_EVIDENCE = 5
"""Blocks before speculation can be found to lose. On trial (`schedule.TRIAL_GAP`) they
take about 250 steps."""

TRIAL_BLOCKS = 16
"""Blocks without such a finding that end a trial, after about 800 steps."""

DOUBT = 3.0
"""Standard errors by which it must lose: it is looked at after every block, and a wrong
finding costs what speculation gains for a while, which is little where it is easily
found."""

MEMORY = 32.0
"""Blocks over which older ones fade: a neighbour may come, or a drafter go stale."""

PAY_BACK = 128.0
"""Steps held for each that was lost: a trial that loses costs less than one per cent of
the time until the next, and half of that each time that it is repeated."""

MIN_HOLD, MAX_HOLD = 1024, 131_072
"""Steps held, at least and at most."""


@dataclass(slots=True)
class Trial:
    """Whether speculation pays at loads of one octave.

    Evidence is what a block's neighbours would have taken without speculation, for the
    tokens that they emitted, less what they took, in steps of the policy's.

    Attributes:
        is_open: Whether this is still open, so that blocks come more often.
        hold_steps: Steps for which depth is held at 0 from now on.
    """

    is_open: bool = True
    hold_steps: int = 0
    _num: float = 0.0
    _num_blocks: int = 0
    _sum: float = 0.0
    _sum_squares: float = 0.0
    _num_steps: int = 0
    _num_failed: int = 0

    def note_step(self) -> None:
        """Count a step of the policy's that speculates."""
        self._num_steps += 1

    def note_block(self, block: BlockResult, prompt_slope: float) -> None:
        """Weigh a block that drafted nothing.

        Args:
            block: What it has shown.
            prompt_slope: What a prompt's token takes in the target's pass, ms. In the
                drafter's it is part of what speculation costs.
        """
        plain_ms = (block.ms - prompt_slope * block.num_prompt) / block.num_steps
        own_ms = block.near_ms - prompt_slope * block.near_prompt
        gained = (block.near_tokens * plain_ms - own_ms) / own_ms
        fade = 1.0 - 1.0 / MEMORY
        self._num = fade * self._num + 1.0
        self._sum = fade * self._sum + gained
        self._sum_squares = fade * self._sum_squares + gained * gained
        self._num_blocks += 1
        mean = self._sum / self._num
        if self._num_blocks >= MIN_EVIDENCE and mean + DOUBT * self._error() < 0.0:
            self._hold(-mean)
        elif self._num_blocks >= TRIAL_BLOCKS:
            self.is_open, self._num_failed, self._num_steps = False, 0, 0

    def spend(self, num_steps: int) -> None:
        """Count steps held; the next trial begins with nothing but its own evidence."""
        self.hold_steps = max(0, self.hold_steps - num_steps)

    def _error(self) -> float:
        mean = self._sum / self._num
        spread = max(0.0, self._sum_squares / self._num - mean * mean)
        return math.sqrt(spread / (self._num - 1.0))

    def _hold(self, lost_share: float) -> None:
        num_lost = lost_share * min(self._num_steps, MIN_HOLD)
        steps = max(MIN_HOLD, PAY_BACK * num_lost) * 2.0**self._num_failed
        self.hold_steps = int(min(steps, MAX_HOLD))
        self.is_open = True
        self._num_failed = min(self._num_failed + 1, 16)
        self._num = self._sum = self._sum_squares = 0.0
        self._num_blocks = self._num_steps = 0


@dataclass(slots=True)
class Holding:
    """A trial for each octave of load: a drafter may pay for few requests alone.

    What it says changes with blocks and counts of steps, once a step and before depth
    is chosen, never by the drafts or the clock of the step that drew them.
    """

    _trials: dict[int, Trial] = field(default_factory=dict)

    def at(self, num_reqs: int) -> Trial:
        """Return the trial of a load."""
        octave = num_reqs.bit_length()
        trial = self._trials.get(octave)
        if trial is None:
            trial = self._trials[octave] = Trial()
        return trial
