"""Never worse than no speculation: hold it back where it loses, and try again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.audit.gain import estimate_gain
from policies.audit.ledger import LoadSums
from policies.audit.schedule import BLOCK_STEPS

if TYPE_CHECKING:
    from policies.audit.block import BlockResult
    from policies.audit.gain import Gain

MIN_RUN = 8
"""Steps in a row that drafted before a block may begin. A policy that rests does what
`none` does, and an exploring step of it is no sample of how it speculates."""

MIN_VISIT = MIN_RUN + BLOCK_STEPS
"""Steps in a row at a load that a block takes. Where a request ends and the next one
comes, a load passes by for a step or two: what is held back would draft each time,
first catch up, and never be judged. So it stays held where the visit before was as
short, until this one proves longer."""

MIN_EVIDENCE = 5
"""Blocks before anything is found. On trial (`schedule.TRIAL_GAP`) they take about 300
steps, with the one that only marks the beginning."""

MIN_AGREEING = 2
"""Blocks that suffice where speculation loses at other loads, and they say the same:
loads that only come and go, as while a burst ends, would be on trial for ever."""

MIN_TRIAL, MAX_TRIAL = 16, 96
"""Blocks before a trial ends well, for the first steps of a young engine compile what
they need and look dearer than they are; and before one ends that has found nothing."""

WINDOWS = (12, MAX_TRIAL, 4 * MAX_TRIAL)
"""Blocks that are looked at: few for what is sudden, as a neighbour or a drafter that
goes stale, many for what is small."""

DOUBT = 1.5
"""Half widths of the 95 % interval by which speculation must lose, for it is looked at
after every block."""

PASS_DOUBT = 2.5
"""Likewise by which it must gain for a trial to end: one that goes on costs next to
nothing where there is little to gain, one that ends by mistake costs thousands of
steps until the few blocks that follow have found it out."""

PAY_BACK = 128.0
"""Steps held for each that was lost: a trial that loses costs less than one per cent of
the time until the next, and half of that each time that it is repeated."""

MIN_HOLD, MAX_HOLD = 1024, 131_072
"""Steps held, at least and at most."""

Loads = dict[int, LoadSums]


@dataclass(slots=True)
class Trial:
    """Whether speculation pays at loads of one octave.

    Attributes:
        is_open: Whether this is still open, so that blocks come more often.
        hold_steps: Steps for which depth is held at 0 from now on.
        num_held: Steps for which it was.
        num_ended: Trials that have ended, well or not.
        num_steps: Steps in a row at such loads, up to now or when they came last.
        last_visit: The same of the time before; 0 where there was none.
    """

    is_open: bool = True
    hold_steps: int = 0
    num_held: int = 0
    num_ended: int = 0
    num_steps: int = 0
    last_visit: int = 0
    _seen: deque[tuple[BlockResult, Loads]] = field(
        default_factory=lambda: deque(maxlen=WINDOWS[-1] + 1)
    )
    _num_failed: int = 0

    @property
    def passes_by(self) -> bool:
        """Whether nothing will be found out at these loads before they are gone."""
        is_short = 0 < self.last_visit < MIN_VISIT and self.num_steps < MIN_RUN
        return is_short and self.is_open

    @property
    def has_failed(self) -> bool:
        """Whether speculation lost when it was tried last."""
        return self._num_failed > 0

    def note_block(
        self, block: BlockResult, loads: Loads, *, loses_elsewhere: bool
    ) -> None:
        """Weigh a block that drafted nothing.

        Args:
            block: What it has shown.
            loads: Sums since the engine's start, of loads of the octave.
            loses_elsewhere: Whether speculation lost at other loads.
        """
        self._seen.append((block, loads))
        is_judged = False
        for num_blocks in WINDOWS:
            gain, num_steps = self._judge(num_blocks, MIN_EVIDENCE)
            if gain is None:
                continue
            is_judged = True
            half = gain.upper - gain.ratio
            if gain.ratio + DOUBT * half < 1.0:
                self._hold((1.0 - gain.ratio) * min(num_steps, MIN_HOLD))
                return
            gains = gain.ratio - PASS_DOUBT * half > 1.0
            if (gains and len(self._seen) > MIN_TRIAL) or len(self._seen) > MAX_TRIAL:
                self.num_ended += self.is_open
                self.is_open, self._num_failed = False, 0
            if len(self._seen) <= num_blocks + 1:
                # A longer window holds no more.
                break
        if loses_elsewhere and self.is_open and not is_judged:
            self._agree()

    def spend(self, num_steps: int) -> None:
        """Count steps held."""
        num_held = min(self.hold_steps, num_steps)
        self.hold_steps -= num_held
        self.num_held += num_held

    def _agree(self) -> None:
        """Hold if what little there is says the same as at other loads."""
        gain, num_steps = self._judge(MIN_EVIDENCE, MIN_AGREEING)
        if gain is not None and gain.ratio < 1.0:
            self._hold((1.0 - gain.ratio) * num_steps)

    def _judge(self, num_blocks: int, min_blocks: int) -> tuple[Gain | None, float]:
        """Return the gain over the latest blocks, and the steps between them."""
        seen = list(self._seen)[-num_blocks - 1 :]
        (_, before), (_, now) = seen[0], seen[-1]
        loads: Loads = {}
        for bucket, sums in now.items():
            loads[bucket] = grown = LoadSums()
            grown.add(sums)
            if bucket in before:
                grown.add(before[bucket], -1.0)
        blocks = [block for block, _ in seen[1:]]
        gain = estimate_gain(loads, blocks, min_blocks=min_blocks)
        return gain, sum(sums.num for sums in loads.values())

    def _hold(self, num_lost: float) -> None:
        steps = max(MIN_HOLD, PAY_BACK * num_lost) * 2.0**self._num_failed
        self.hold_steps = int(min(steps, MAX_HOLD))
        self.num_ended += self.is_open
        self.is_open = True
        self._num_failed = min(self._num_failed + 1, 16)
        self._seen.clear()


@dataclass(slots=True)
class Holding:
    """A trial for each octave of load: a drafter may pay for few requests alone.

    What it says changes with blocks and counts of steps, once a step and before depth
    is chosen, never by the drafts or the clock of the step that drew them.
    """

    _trials: dict[int, Trial] = field(default_factory=dict)
    _visited: Trial | None = None

    @property
    def num_held(self) -> int:
        """Steps held, at all loads."""
        return sum(trial.num_held for trial in self._trials.values())

    def note_block(self, block: BlockResult, loads: Loads) -> None:
        """Weigh a block that drafted nothing; `loads` as in `Trial.note_block`."""
        trial = self.at(block.num_reqs)
        others = [one for one in self._trials.values() if one is not trial]
        loses_elsewhere = any(one.has_failed for one in others)
        trial.note_block(block, loads, loses_elsewhere=loses_elsewhere)

    def visit(self, num_reqs: int) -> Trial:
        """Return the trial of a load, which is that of one step more."""
        trial = self.at(num_reqs)
        if trial is not self._visited:
            self._visited = trial
            trial.last_visit, trial.num_steps = trial.num_steps, 0
        trial.num_steps += 1
        return trial

    def at(self, num_reqs: int) -> Trial:
        """Return the trial of a load."""
        octave = num_reqs.bit_length()
        trial = self._trials.get(octave)
        if trial is None:
            trial = self._trials[octave] = Trial()
        return trial
