"""Steps at depth 0 in which there is nothing to plan: they cost what vLLM's own do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.engine.compat import SchedulerOutput
    from serving.engine.shared.counters import SpeculationCounters

TELL_ALL = 16
"""Steps in a row at depth 0 that are all planned and timed first, while the planner may
still have to find its way and has outcomes to learn from."""

TELL_EVERY = 8
"""Of those that follow, one in this many is timed, and the next one planned, while the
same requests go on. To plan and to learn in every step would take a hundredth of a
small model's step and more, and lead to the same."""


@dataclass(slots=True)
class SkippedPlanning:
    """Counts steps in a row at depth 0, where the drafter can be left out altogether.

    A step is *unplanned* if its requests are those of the step before, each of which
    got one token then: it is scheduled as vLLM does, and drafts nothing. A step is
    *quiet* if nobody is told what it took.

    Attributes:
        is_possible: Whether the engine leaves its drafter out at depth 0; else no step
            is either.
        num_skipped: Unplanned steps since the planner was last asked.
        num_uncounted: Those of them that are in no counter yet.
        num_drafting: Requests that would have drafted in each of these.
    """

    is_possible: bool
    num_skipped: int = 0
    num_uncounted: int = 0
    num_drafting: int = 0
    _num_at_zero: int = field(init=False, default=0)
    _num_reqs: int = field(init=False, default=0)

    def is_due(self, num_running: int, num_waiting: int) -> bool:
        """Whether the coming step needs no plan.

        Whoever joins has to wait before, if only for this step.
        """
        return (
            num_running == self._num_reqs
            and num_waiting == 0
            and num_running > 0
            and self._num_at_zero % TELL_EVERY != 0
        )

    def is_unchanged(self, num_running: int) -> bool:
        """Whether the latest step was an unplanned one that nobody left."""
        return self.num_skipped > 0 and num_running == self._num_reqs

    def note_unplanned(self) -> None:
        """Take in a step that was not planned."""
        self.num_skipped += 1
        self._num_at_zero += 1

    def reset(self) -> None:
        """Have the coming steps planned: nothing is known of the latest one."""
        self.num_skipped = self._num_at_zero = self._num_reqs = 0

    def note_planned(self, output: SchedulerOutput, num_running: int) -> None:
        """Take in a step that was planned.

        Args:
            output: The step, its depth included.
            num_running: Requests that run, in the step or not.
        """
        self.num_skipped = 0
        depth = output.num_spec_tokens_to_schedule
        is_without_drafter = self.is_possible and depth == 0
        self._num_at_zero = self._num_at_zero + 1 if is_without_drafter else 0
        is_settled = self._num_at_zero >= TELL_ALL
        num_scheduled = len(output.num_scheduled_tokens)
        same = output.total_num_scheduled_tokens == num_scheduled == num_running
        self._num_reqs = num_running if is_settled and same else 0

    def count_into(self, counters: SpeculationCounters) -> None:
        """Count what was not yet: steps with the requests of the step before them."""
        num_steps, self.num_uncounted = self.num_uncounted, 0
        counters.num_steps += num_steps
        counters.count_cut("depth", counters.max_depth * num_steps * self.num_drafting)

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is told what the latest step took."""
        return self._num_at_zero > TELL_ALL and self._num_at_zero % TELL_EVERY != 0
