"""Orders to the device, and what is kept of each until its step comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.gpu.clock import StepLoads
from serving.engine.gpu.step_messages import ORDER_ATTRIBUTE

if TYPE_CHECKING:
    from policies.types import DraftSelection
    from serving.engine.compat import SchedulerOutput
    from serving.engine.gpu.step_messages import VerificationOrder


class IssuedOrders:
    """Numbers the steps, and follows those in flight.

    Attributes:
        loads: What steps carried, until their times come.
    """

    def __init__(self) -> None:
        """Start with an idle engine."""
        self.loads = StepLoads()
        self._selections: dict[int, DraftSelection] = {}
        self._last_id = 0
        self._num_in_flight = 0
        self._after_idle = True

    def __len__(self) -> int:
        """Return how many selections are kept."""
        return len(self._selections)

    def begin(self, num_running: int) -> None:
        """Note that a step is about to be scheduled.

        Behind the last requests of a batch, a step that emits nothing any more may stay
        in flight until the next batch comes.
        """
        self._after_idle = self._num_in_flight == 0 or num_running == 0

    def note_sent(self) -> None:
        """Note that a step was scheduled."""
        self._num_in_flight += 1

    def note_returned(self) -> None:
        """Note that a step's output came."""
        self._num_in_flight -= 1

    def next_id(self) -> int:
        """Number a step."""
        self._last_id += 1
        return self._last_id

    def issue(
        self,
        order: VerificationOrder,
        output: SchedulerOutput,
        selection: DraftSelection | None,
        num_context_tokens: int,
    ) -> None:
        """Attach an order to its step, and keep what made it.

        Args:
            order: With a number of its own.
            output: The step.
            selection: The planner's; None where it made none.
            num_context_tokens: KV positions that the step attends to.
        """
        setattr(output, ORDER_ATTRIBUTE, order)
        if selection is not None:
            self._selections[order.step_id] = selection
        self.loads.note(
            order.step_id,
            output,
            draft_budget=order.draft_budget,
            num_context_tokens=num_context_tokens,
            after_idle=self._after_idle,
        )

    def take_selection(self, output: SchedulerOutput) -> DraftSelection | None:
        """Hand over what a step that has come back was ordered by."""
        order: VerificationOrder | None = getattr(output, ORDER_ATTRIBUTE, None)
        return None if order is None else self._selections.pop(order.step_id, None)
