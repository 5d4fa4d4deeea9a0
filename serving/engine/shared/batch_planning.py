"""How many requests and prompt tokens the coming step takes, as the planner says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.shared.ageing import Ageing
from serving.engine.shared.batch_limits import BatchLimits
from serving.engine.shared.class_mix import ClassMix
from serving.engine.shared.kv_shortage import trim_to_free_blocks

if TYPE_CHECKING:
    from policies.planner import Planner
    from serving.engine.compat import Scheduler
    from serving.engine.shared.counters import SpeculationCounters
    from serving.engine.shared.faults import FaultGuard
    from serving.engine.shared.request_classes import RequestClasses


class BatchPlanning:
    """Prepares a scheduler's queue and limits for each step.

    Attributes:
        ageing: Orders the queue.
        limits: What a plan is applied through.
        mix: Which classes run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        classes: RequestClasses,
        counters: SpeculationCounters,
        guard: FaultGuard,
    ) -> None:
        """Plan for this scheduler."""
        self.ageing = Ageing(scheduler, classes, counters)
        self.limits = BatchLimits(scheduler)
        self.mix = ClassMix()
        self._scheduler = scheduler
        self._classes = classes
        self._counters = counters
        self._guard = guard

    def plan(self, planner: Planner) -> None:
        """Set the limits of the coming step; vLLM's own where nothing asks for less.

        The queue is put into order before, for they are made for its head; drafts for
        which no KV blocks are left are cut after.
        """
        attempt = self._guard.attempt
        attempt("ageing_error", self.ageing.look)
        if not attempt("limits_error", self._limit, planner):
            self.limits.lift()
        num_cut = attempt("kv_error", trim_to_free_blocks, self._scheduler) or 0
        self._counters.count_cut("kv", num_cut)

    def _limit(self, planner: Planner) -> bool:
        scheduler = self._scheduler
        running = scheduler.running
        # A list is faster than a generator.
        if not (scheduler.waiting or sum([one.is_prefill_chunk for one in running])):
            # Neither a queue nor a prompt under way: there is nothing to limit.
            return False
        classes = self.mix.note(self._classes.count(running))
        target_ms = self._classes.tightest_target_ms(running)
        load = self.limits.measure_load(target_ms, classes)
        plan = self._guard.ask(planner.plan_batch, load)
        if plan is None:
            return False
        self.limits.apply(plan, load)
        return True
