"""Workers, supplied through `worker_cls`: vLLM's own, with a recording drafter."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from serving.engine.compat import check
from serving.engine.compat_cpu import CPUWorker
from serving.engine.compat_names import CPU_WORKER
from serving.engine.cpu.drafter import ConfidenceDrafter, adopt_drafter
from serving.engine.cpu.drafts import ScoredDraftTokenIds, WorkerTimes
from serving.engine.cpu.kernels import repair_kernels
from serving.engine.cpu.profile import profile_passes
from serving.engine.cpu.runner import adopt_runner
from serving.engine.shared.faults import FaultGuard

if TYPE_CHECKING:
    from policies.types import CostProfile
    from serving.engine.compat import DraftTokenIds


class TetrisCPUWorker(CPUWorker):
    """A CPU worker whose draft tokens carry the drafter's confidence."""

    def load_model(self, **kwargs: Any) -> None:
        """Load both models, then let runner and drafter record.

        Raises:
            MovedNamesError: This vLLM is not as the worker expects it.
        """
        check(CPU_WORKER)
        super().load_model(**kwargs)
        repair_kernels()
        self._guard = FaultGuard(Counter(), "worker")
        adopt_runner(self.model_runner, self._guard)
        adopt_drafter(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then time a few forward passes for the cost model."""
        times = super().compile_or_warm_up_model()
        self._profile: CostProfile | None = profile_passes(self.model_runner)
        return times

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target, noting when the step began."""
        self._step_start_s = time.perf_counter()
        return super().execute_model(*args, **kwargs)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return this step's drafts with their confidences.

        Called once after every step, so a record never outlives its step.
        """
        runner = self.model_runner
        if runner.ran_quietly:
            return None
        drafts = super().take_draft_token_ids()
        if drafts is None and not runner.ran_alone:
            return None
        attempt = self._guard.attempt
        drafter = getattr(runner, "drafter", None)
        confidence = None
        if isinstance(drafter, ConfidenceDrafter):
            confidence = attempt("report_error", drafter.take_confidence)
            times = attempt(
                "report_error",
                drafter.take_times,
                self._step_start_s,
                runner.sample_start_s,
                runner._cold,
            )
        else:
            times = attempt("report_error", self._time_drafting, drafts)
        return ScoredDraftTokenIds(
            # A step of the target alone has nothing but its times to tell.
            req_ids=[] if drafts is None else drafts.req_ids,
            draft_token_ids=[] if drafts is None else drafts.draft_token_ids,
            confidence=confidence,
            drafter_skipped=runner._drafter_skipped,
            times=times,
            profile=self._take_profile(),
            faults=self._guard.hand_over(),
        )

    def _time_drafting(self, drafts: DraftTokenIds | None) -> WorkerTimes | None:
        """Time a step whose drafter keeps no clock; None if it drafted nothing."""
        runner = self.model_runner
        begin_s, end_s = runner.draft_span_s
        if drafts is None or begin_s < self._step_start_s:
            return None
        return WorkerTimes(
            target_ms=1e3 * (runner.sample_start_s - self._step_start_s),
            sample_ms=1e3 * (begin_s - runner.sample_start_s),
            # A look-up, or one pass for the whole draft.
            draft_first_ms=1e3 * (end_s - begin_s),
            draft_next_ms=0.0,
            depth=max(map(len, drafts.draft_token_ids), default=0),
        )

    def _take_profile(self) -> CostProfile | None:
        profile, self._profile = self._profile, None
        return profile
