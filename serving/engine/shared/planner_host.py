"""What both schedulers do alike, wherever the drafts are: host a planner."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.logger import init_logger

from policies.audit.audited import AuditedPlanner
from policies.audit.schedule import AuditSchedule
from policies.estimators.step_cost import StepCost
from policies.registry import build_planner
from policies.types import EngineLimits
from policies.warmup import warm_up
from serving.engine.compat import check
from serving.engine.compat_names import SCHEDULER
from serving.engine.shared.audit_log import AuditLog
from serving.engine.shared.batch_planning import BatchPlanning
from serving.engine.shared.board import BoardRecorder
from serving.engine.shared.counters import SpeculationCounters
from serving.engine.shared.faults import FaultGuard
from serving.engine.shared.options import (
    ADDITIONAL_CONFIG_KEY,
    read_policy,
    wants_watchdog,
)
from serving.engine.shared.outcomes import NOTHING_VERIFIED, read_emitted
from serving.engine.shared.request_classes import RequestClasses
from serving.engine.shared.watchdog import SpeculationWatchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from policies.planner import Planner
    from policies.types import PolicySpec, VerificationOutcome
    from serving.engine.compat import ModelRunnerOutput, Request, SchedulerOutput

# What is below `vllm` is written from INFO on; all else from WARNING on.
logger = init_logger(f"vllm.{__name__}")

_AUDIT_SEED: Final = 0
"""Of the luck that chooses audited steps; nothing else draws from it."""


class PlannerHost:
    """Mixin in front of one of vLLM's schedulers.

    Attributes:
        counters: Cumulative figures of the engine.
        board: What the engine does step by step, while somebody watches.
    """

    counters: SpeculationCounters
    board: BoardRecorder
    _planner: Planner
    _limits: EngineLimits
    _steps_overlap: bool
    _audit_log: AuditLog
    _classes: RequestClasses
    _batch: BatchPlanning
    _guard: FaultGuard
    _watchdog: SpeculationWatchdog | None
    # vLLM's scheduler brings these.
    vllm_config: Any
    scheduler_config: Any
    running: list[Request]
    waiting: Any
    max_model_len: int
    num_spec_tokens: int
    get_request_counts: Callable[[], tuple[int, int]]
    get_kv_cache_usage: Callable[[], float]

    def _host_planner(
        self,
        *,
        padded_sizes: tuple[int, ...],
        skips_drafter: bool,
        exits_early: bool = False,
        steps_overlap: bool = True,
    ) -> PolicySpec:
        """Build the planner the engine's configuration names, and what it needs.

        Args:
            padded_sizes: As `EngineLimits.padded_sizes`.
            skips_drafter: Whether depth 0 leaves the drafter out altogether.
            exits_early: Whether a draft can end between two of the drafter's passes.
            steps_overlap: Whether a step is planned before all is known of the one
                before it: then nothing is audited.

        Raises:
            ValueError: If the configuration cannot work.
            MovedNamesError: If this vLLM is not as the schedulers expect it.
        """
        check(SCHEDULER)
        spec = read_policy(self.vllm_config)
        speculative = self.vllm_config.speculative_config
        self._limits = limits = EngineLimits(
            max_tokens=self.scheduler_config.max_num_batched_tokens,
            max_reqs=self.scheduler_config.max_num_seqs,
            skips_drafter=skips_drafter,
            exits_early=exits_early,
            method=speculative.method,
            padded_sizes=padded_sizes,
        )
        self._steps_overlap = steps_overlap
        self._planner = self._build_planner(spec)
        self._classes = RequestClasses.read(self.vllm_config)
        self.counters = SpeculationCounters(
            policy=spec.name,
            method=speculative.method,
            max_depth=speculative.num_speculative_tokens,
        )
        self._guard = FaultGuard(self.counters.num_fallbacks, f"policy {spec.name}")
        started_s = time.perf_counter()
        self._guard.ask(warm_up, spec, limits)
        logger.info(
            "Planner %s compiled in %.1f s", spec.name, time.perf_counter() - started_s
        )
        self._batch = BatchPlanning(self, self._classes, self.counters, self._guard)
        self.board = BoardRecorder()
        self._set_watchdog(self.vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])
        self._audit_log = AuditLog()
        return spec

    def _set_watchdog(self, section: Mapping[str, Any]) -> None:
        """Have a new watchdog, or none; nothing is under quarantine."""
        self._watchdog = None
        self.counters.num_quarantined.clear()
        if wants_watchdog(section):
            self._watchdog = SpeculationWatchdog(self._classes, self.counters)

    def _build_planner(self, spec: PolicySpec) -> Planner:
        planner = build_planner(spec, self._limits)
        if self._steps_overlap or not spec.audit:
            return planner
        schedule = AuditSchedule(spec.audit, np.random.default_rng(_AUDIT_SEED))
        return AuditedPlanner(planner, schedule)

    def snapshot(self) -> dict[str, Any]:
        """Return counters, the queue and the planner's gauges as plain values."""
        num_running, num_waiting = self.get_request_counts()
        report = self._guard.ask(self._report, num_running) or {}
        self._guard.attempt("audit_error", self._audit_log.say, report)
        return {
            **self.counters.snapshot(),
            "num_running": num_running,
            "num_waiting": num_waiting,
            "kv_cache_usage": float(self.get_kv_cache_usage()),
            "planner": report,
        }

    def _report(self, num_running: int) -> dict[str, float]:
        report = self._planner.report()
        cost = getattr(self._planner, "cost", None)
        if isinstance(cost, StepCost):
            # Where nothing is verified, the pass runs over a token of each request.
            first_ms = cost.draft_first.at(max(1, num_running))
            report = report | {"warm_depth0_ms": first_ms}
        return report

    def watch_board(self, after: int, *, with_ids: bool) -> dict[str, Any]:
        """Return what `BoardRecorder.watch` does, and what the policy gains.

        `gain` holds the ratio over no speculation and the ends of its interval, or is
        empty where that cannot be told; `held` says whether speculation is held back.
        """
        report = self._guard.ask(self._planner.report) or {}
        names = (f"speculation_gain_none{end}" for end in ("", "_lower", "_upper"))
        return {
            **self.board.watch(after, with_ids=with_ids),
            "gain": [report[name] for name in names if name in report],
            "held": bool(report.get("speculation_held")),
        }

    def export_state(self) -> dict[str, Any]:
        """Return what the planner learnt, for a new replica to start from."""
        return self._planner.export_state()

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from what another replica's planner learnt.

        Raises:
            ValueError: It cannot be true, or was learnt elsewhere; nothing has changed
                then, whatever the policy.
        """
        planner = copy.deepcopy(self._planner)
        planner.import_state(state)
        self._planner = planner

    def change_policy(self, section: Mapping[str, Any]) -> None:
        """Put another planner in charge from the coming step on; nothing is dropped.

        Takes as long as a planner takes to compile. It has everything to learn.

        Args:
            section: As in `additional_config`.

        Raises:
            ValueError: This engine cannot run it; nothing has changed then.
        """
        spec = read_policy(self.vllm_config, section)
        classes = RequestClasses.from_section(section)
        planner = self._build_planner(spec)
        self._guard.ask(warm_up, spec, self._limits)
        self._planner = planner
        self._classes.become(classes)
        self._set_watchdog(section)
        self.counters.policy = spec.name
        logger.info("Policy %s is in charge now", spec.name)

    def wrap_planner(self, wrap: Callable[[Any], Any]) -> None:
        """Put somebody between engine and planner, for good: to record or hold it back.

        Args:
            wrap: Takes the planner; returns what is asked in its place from now on.
        """
        self._planner = wrap(self._planner)

    def _choose_depth(self, num_reqs: int) -> int | None:
        """Ask for the next depth, within the engine's; None if the planner fails."""
        target_ms = self._classes.tightest_target_ms(self.running)
        depth: int | None = self._guard.ask(self._ask_depth, num_reqs, target_ms)
        if depth is None:
            return None
        depth = max(0, min(depth, self.num_spec_tokens))
        if self._watchdog is not None and self._watchdog.is_active:
            limit = self._watchdog.limit_depth
            depth = self._guard.attempt("watchdog_error", limit, depth, self.running)
        return depth

    def _ask_depth(self, num_reqs: int, target_ms: float | None) -> int:
        return int(self._planner.choose_depth(num_reqs, target_ms))

    def _learn(self, outcome: VerificationOutcome | None) -> None:
        """Teach the planner a step's outcome; None if there is none to rely on."""
        self._guard.ask(self._planner.observe, outcome or NOTHING_VERIFIED)

    @property
    def _probes(self) -> frozenset[str]:
        """Requests whose drafts the watchdog has verified; no planner is asked."""
        return frozenset() if self._watchdog is None else self._watchdog.probes

    def _begin_watching(self, can_draft: Callable[[Request, int], bool]) -> None:
        """Take from requests under quarantine the drafts that they may not have."""
        watchdog = self._watchdog
        if watchdog is not None:
            for req_id in watchdog.take_recovered():
                self._guard.ask(self._planner.forget, req_id)
            watchdog.begin_step(self.running, can_draft)

    def _count_planning(self, started_s: float) -> None:
        """Count the time since then as time spent on planning."""
        self.counters.planning_seconds_total += time.perf_counter() - started_s

    def _count_context(self) -> int:
        return sum([request.num_computed_tokens for request in self.running])

    def _show(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        """Put a step on the board."""
        self.board.note_outcome(
            read_emitted(scheduler_output, model_runner_output),
            budget=self.counters.last_draft_budget,
            depth=self.counters.draft_depth,
            running=[request.request_id for request in self.running],
            waiting=len(self.waiting),
        )

    def _forget(self, request: Request) -> None:
        """Drop what is kept about a request that has ended."""
        self._guard.ask(self._planner.forget, request.request_id)
        self._classes.forget(request.request_id)
        if self._watchdog is not None:
            self._watchdog.forget(request.request_id)
        self._batch.limits.note_finished(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        self._guard.attempt("forget_error", self._forget, request)
        self._count_planning(started_s)
        return super()._free_request(  # type: ignore[misc]  # vLLM's scheduler follows
            request, *args, **kwargs
        )
