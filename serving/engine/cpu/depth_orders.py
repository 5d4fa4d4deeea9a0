"""What a step's runner is told of the drafts to make: how deep, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.cpu.step_messages import REBUILD_ATTRIBUTE, STOP_ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.decisions.early_exit import EarlyExitRule
    from policies.planner import Planner
    from serving.engine.compat import Request, SchedulerOutput
    from serving.engine.cpu.drafter_traits import DrafterTraits
    from serving.engine.cpu.pending_drafts import PendingDrafts
    from serving.engine.shared.faults import FaultGuard
    from serving.engine.shared.request_classes import RequestClasses
    from serving.engine.shared.watchdog import SpeculationWatchdog


class DepthOrders:
    """Attaches to a scheduled step what its drafter is to do."""

    def __init__(
        self,
        max_depth: int,
        drafts: PendingDrafts,
        traits: DrafterTraits,
        classes: RequestClasses,
        guard: FaultGuard,
    ) -> None:
        """Order nothing yet.

        Args:
            max_depth: The engine's, which a drafter of one depth always drafts to.
            drafts: Knows who may draft.
            traits: The drafter's.
            classes: Weigh requests.
            guard: Asks the planner.
        """
        self._max_depth, self._drafts, self._traits = max_depth, drafts, traits
        self._classes, self._guard = classes, guard

    def give(
        self,
        output: SchedulerOutput,
        scheduled: Sequence[Request],
        depth: int | None,
        planner: Planner,
        watchdog: SpeculationWatchdog | None,
    ) -> None:
        """Attach an order.

        Args:
            output: The step.
            scheduled: Its requests.
            depth: As the planner chose; None if it failed, which leaves vLLM's.
            planner: Is asked when a draft may end short of it.
            watchdog: Has drafts left out, or tried; None without.
        """
        if self._traits.has_one_depth:
            depth = self._max_depth
        elif depth and not self._drafts.rooms.may_anybody_draft(scheduled):
            # The planner would take what nobody may use for drafts that are rejected.
            depth = 0
        if depth is None:
            return
        output.num_spec_tokens_to_schedule = depth
        if depth > 0 and watchdog is not None:
            setattr(output, REBUILD_ATTRIBUTE, watchdog.take_rebuilds())
        # Who is tried is drafted for to the end; a rule leaves everybody a first draft.
        if depth > 1 and not (watchdog is not None and watchdog.least_depth > 1):
            limits = {} if watchdog is None else watchdog.limits
            setattr(output, STOP_ATTRIBUTE, self._ask_stop(scheduled, planner, limits))

    def _ask_stop(
        self, scheduled: Sequence[Request], planner: Planner, limits: dict[str, int]
    ) -> EarlyExitRule | None:
        drafting = self._drafts.find_drafting(scheduled)
        if limits:
            drafting = [r for r in drafting if limits.get(r.request_id, 1) > 0]
        req_ids = tuple([request.request_id for request in drafting])
        weights = self._classes.weigh(drafting)
        stop: EarlyExitRule | None = self._guard.ask(
            planner.early_exit, req_ids, weights
        )
        return stop
