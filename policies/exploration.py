"""Steps that are not the best guess, and what resuming a skipped drafter takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.estimators.step_cost import StepCost
    from policies.types import StepTiming

EXPLORE_EVERY = 48
"""At depth 0 one step in this many drafts anyway, for fresh confidence when the load
falls, or fewer where catching up makes that dear."""

MAX_EXPLORE_SHARE = 0.004
"""Share of the time that exploring should take at most."""

MAX_EXPLORE_INTERVAL = 400
"""Steps after which a drafter is tried again however dear its passes seem to be: their
price may be an old one."""

MAX_BACKLOG_INTERVAL = 20_000
"""The same, once its price has been paid, where catching up is what makes it dear or a
latency target forbids it: for a drafter that is not small beside its target, filling
the KV cache of a batch takes seconds."""

EXPLORE_DEPTH = 2
"""Depth of an exploring step: enough to see how acceptance falls with position."""

PROBE_EVERY = 512
"""While drafting, one step in this many verifies nothing: the price of a plain step is
what every draft is compared with, and an old or guessed one would confirm itself."""

MAX_PROBE_SHARE = 0.002
"""Share of the tokens that this should cost at most. A step that drafts in vain loses
about what drafting gains: where that is little, probes are cheap, and it is there that
a wrong price decides."""

FIRST_PROBE = 8
"""Steps until the first probe at a load, then twice as many each time: what a plain
step of so many requests costs was only guessed, from other loads or from one timing at
the start. A guess a sixth too dear had SmolLM2 draft for 9 s, to the first probe, when
16 requests came after 4."""

DOUBTFUL_GAIN = 1.5
"""A gain above it is none of a guess so wrong, and every probe would cost it."""

TIME_PASS_EVERY = 64
"""Steps in a row that end their drafts after one pass, at most: the price of a second
pass would be an old one otherwise, and confirm itself."""


@dataclass(slots=True)
class Exploration:
    """Decides by counting alone, never by drafts or clocks, when to try something else.

    Attributes:
        exploring: The latest depth was an exploring one.

    Source: ours.
    """

    exploring: bool = field(init=False, default=False)
    _num_explored: int = field(init=False, default=0)
    _steps_since_pass: int = field(init=False, default=0)
    _interval: float = field(init=False, default=EXPLORE_EVERY)
    _steps_at_zero: int = field(init=False, default=0)
    _steps_since_probe: int = field(init=False, default=0)
    _first_probe: dict[int, int] = field(init=False, default_factory=dict)

    def set_cost(
        self,
        explore_ms: float,
        step_ms: float,
        backlog_ms: float = 0.0,
        max_step_ms: float | None = None,
    ) -> None:
        """Explore as often as is affordable.

        Args:
            explore_ms: What an exploring step takes longer, without catching up.
            step_ms: A step that drafts nothing.
            backlog_ms: What filling the drafter's KV cache takes first.
            max_step_ms: Longest step that a latency target bears, or None.
        """
        affordable_ms = MAX_EXPLORE_SHARE * max(step_ms, 1e-6)
        # min and max: np.clip takes longer than all the rest.
        passes = max(explore_ms / affordable_ms, EXPLORE_EVERY)
        backlog = min(backlog_ms / affordable_ms, MAX_BACKLOG_INTERVAL)
        self._interval = min(passes, MAX_EXPLORE_INTERVAL) + backlog
        whole_ms = step_ms + explore_ms + backlog_ms
        if max_step_ms is not None and step_ms <= max_step_ms < whole_ms:
            self._interval = MAX_BACKLOG_INTERVAL
        if self._num_explored == 0:
            self._interval = min(self._interval, MAX_EXPLORE_INTERVAL)

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 for which no depth was asked."""
        self._steps_at_zero += num_steps

    def adjust_depth(self, depth: int, max_depth: int) -> int:
        """Return the depth to draft: the planned one, or now and then more than 0."""
        self.exploring = False
        if depth > 0:
            self._steps_at_zero = 0
            return depth
        self._steps_at_zero += 1
        if self._steps_at_zero < self._interval:
            return 0
        self._steps_at_zero = 0
        self.exploring = True
        self._num_explored += 1
        return min(EXPLORE_DEPTH, max_depth)

    def pick_rows(self, num_reqs: int) -> NDArray[np.int64]:
        """Return the requests that verify a draft in this exploring step, in turn.

        Returns:
            One and a quarter of `num_reqs`, in any order.
        """
        count = min(num_reqs, 1 + num_reqs // 4)
        first = self._num_explored * count
        rows: NDArray[np.int64] = (first + np.arange(count)) % max(num_reqs, 1)
        return rows

    def note_passes(self, depth: int) -> None:
        """Count steps whose draft ended after one pass, by their depth."""
        self._steps_since_pass = self._steps_since_pass + 1 if depth == 1 else 0

    def is_pass_due(self) -> bool:
        """Tell, once, whether a second pass has not been timed for long."""
        is_due = self._steps_since_pass >= TIME_PASS_EVERY
        if is_due:
            self._steps_since_pass = 0
        return is_due

    def is_probing(
        self, gain: float, num_reqs: int, *, has_prompts: bool = False
    ) -> bool:
        """Tell, once a step, whether its drafts are left unverified.

        Args:
            gain: Tokens per second that drafting promises, over those without it.
            num_reqs: Requests that decode.
            has_prompts: Of the step, which says little of a plain one then; it is
                probed only where no other comes for long.
        """
        self._steps_since_probe += 1
        interval = (gain - 1.0) / MAX_PROBE_SHARE
        if interval < EXPLORE_EVERY:
            interval = EXPLORE_EVERY
        elif interval > PROBE_EVERY:
            interval = PROBE_EVERY
        load = num_reqs if num_reqs < 16 else 16 + num_reqs // 8
        first = self._first_probe.get(load, FIRST_PROBE)
        if first < interval and gain < DOUBTFUL_GAIN:
            interval = first
        if has_prompts:
            interval *= 2
        if self.exploring or self._steps_since_probe < interval:
            return False
        self._steps_since_probe = 0
        self._first_probe[load] = 2 * first
        return True


RESUME_HORIZON_STEPS = 40
"""Steps over which catching up after cold depth 0 is paid off: as long as the load that
made drafting worthwhile is expected to last."""


@dataclass(slots=True)
class DrafterBacklog:
    """Positions of the running requests that lack the drafter's KV.

    Only where the engine skips the drafter at depth 0; elsewhere nothing is missing. At
    depth 0 for long it times one step in eight: steps are counted as they are planned
    or told to have been skipped, and a timing is about the latest of them.

    Attributes:
        num_positions: Positions over all running requests.
    """

    num_positions: int = 0
    _num_reqs: int = field(init=False, default=0)
    _is_counted: bool = field(init=False, default=False)

    def note_planned(self, num_reqs: int) -> None:
        """Count a step that is planned for depth 0, timed or not."""
        self._num_reqs = num_reqs
        self.note_skipped_steps(1)

    def note_skipped_steps(self, num_steps: int) -> None:
        """Count steps at depth 0 of the latest requests, a token each."""
        self.num_positions += num_steps * self._num_reqs
        self._is_counted = True

    def note(self, timing: StepTiming) -> None:
        """Take in a step; one that nobody counted, as an audit's own, counts now."""
        is_counted, self._is_counted = self._is_counted, False
        self._num_reqs = timing.num_reqs
        if timing.depth > 0:
            self.num_positions = 0
            return
        num_missed = timing.num_tokens - (timing.num_reqs if is_counted else 0)
        # Requests that end take their share of the missing positions along.
        self.num_positions = min(
            self.num_positions + num_missed, timing.num_context_tokens
        )

    def fill_ms(self, cost: StepCost) -> float:
        """Return what filling all of them at once takes, in the first drafting step."""
        return cost.draft_first.at(self.num_positions)

    def share_ms(self, cost: StepCost) -> float:
        """Return the same as a share of each of the steps that pay it off."""
        return self.fill_ms(cost) / RESUME_HORIZON_STEPS
