"""Scheduler, supplied through `scheduler_cls`: vLLM's own, with draft selection."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.types import VerificationOutcome
from serving.engine.compat import Scheduler
from serving.engine.cpu.depth_orders import DepthOrders
from serving.engine.cpu.drafter_traits import DrafterTraits
from serving.engine.cpu.drafts import ScoredDraftTokenIds
from serving.engine.cpu.pending_drafts import PendingDrafts
from serving.engine.cpu.selection import DraftSelector
from serving.engine.cpu.skipped_planning import SkippedPlanning
from serving.engine.cpu.step_clock import StepClock
from serving.engine.cpu.step_messages import QUIET_ATTRIBUTE
from serving.engine.cpu.step_sizes import CPU_STEP_SIZES
from serving.engine.shared.outcomes import (
    NOTHING_VERIFIED,
    keep_known,
    keep_rows,
    read_outcomes,
)
from serving.engine.shared.planner_host import PlannerHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.engine.compat import (
        DraftTokenIds,
        EngineCoreOutputs,
        ModelRunnerOutput,
        Request,
        SchedulerOutput,
    )


class TetrisScheduler(PlannerHost, Scheduler):
    """vLLM's scheduler, verifying only the drafts a policy admits.

    Changes against upstream, all before or after its own methods:
        `update_draft_token_ids`: keeps the confidences; drops drafts that cannot be
            used (opt-out, past the request's or the drafter's end).
        `schedule`: trims drafts to the selection first, sets the next draft depth
            after, and when the draft may end short of it. While nothing is drafted
            and the same requests go on, most steps are left to vLLM
            (`skipped_planning`).
        `update_from_output`: counts and learns from what the target accepted.
    A fault in a policy or in a part of our own, or a confidence that is missing or no
    probability, verifies everything drafted in that step and teaches nothing; the
    engine goes on, and a counter says why (`faults`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the planner the engine's configuration names."""
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Build the planner, and all that prepares and carries out what it decides."""
        self._drafter = traits = DrafterTraits.read(
            self.vllm_config, self.num_spec_tokens, self.max_model_len
        )
        self._host_planner(
            padded_sizes=CPU_STEP_SIZES,
            skips_drafter=traits.can_be_skipped,
            exits_early=traits.exits_early,
            steps_overlap=False,
        )
        self._clock = StepClock()
        self._skipping = SkippedPlanning(traits.can_be_skipped)
        self._drafts = PendingDrafts(
            traits, self.max_model_len, self.counters, self._guard
        )
        self._selector = DraftSelector(
            self,
            self._drafts,
            traits,
            classes=self._classes,
            counters=self.counters,
            guard=self._guard,
            board=self.board,
        )
        parts = self._drafts, traits, self._classes, self._guard
        self._depth_orders = DepthOrders(self.num_spec_tokens, *parts)

    # The engine core calls these in turn: update_draft_token_ids, schedule,
    # (the model runs), update_from_output.

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Attach new drafts to their requests and keep their confidences."""
        super().update_draft_token_ids(draft_token_ids)
        started_s = time.perf_counter()
        self._guard.attempt("timing_error", self._take_news, draft_token_ids)
        try:
            self._drafts.take(draft_token_ids, self.requests)
        except Exception:
            self._guard.note("drafts_error", exc_info=True)
            self._drafts.take_unseen(draft_token_ids, self.requests)
        self._count_planning(started_s)

    def _take_news(self, draft_token_ids: DraftTokenIds) -> None:
        """Take in what the worker tells beside its drafts."""
        if isinstance(draft_token_ids, ScoredDraftTokenIds):
            if draft_token_ids.faults:
                self.counters.num_fallbacks.update(draft_token_ids.faults)
            self._clock.note_worker(draft_token_ids.times)
            if draft_token_ids.profile is not None:
                self._guard.ask(self._planner.fit_profile, draft_token_ids.profile)
        if not self.has_unfinished_requests():
            self._clock.discard()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Trim the drafts to the policy's selection, then schedule as vLLM does."""
        now_s = time.perf_counter()
        attempt = self._guard.attempt
        if attempt("skip_error", self._skips_planning):
            return self._schedule_unplanned(now_s, *args, **kwargs)
        if self.board.is_watched:
            attempt("board_error", self.board.start_step)
        if self._skipping.num_skipped:
            attempt("skip_error", self._tell_skipped)
        attempt("timing_error", self._learn_timing, now_s)
        attempt("watchdog_error", self._begin_watching, self._drafts.rooms.can_draft)
        try:
            self._selector.select(self._planner, self._probes)
        except Exception:
            self._guard.note("selection_error", exc_info=True)
            self._selector.admit_unselected()
        self._batch.plan(self._planner)
        self._selector.note_offered()
        self._count_planning(now_s)
        output = super().schedule(*args, **kwargs)
        started_s = time.perf_counter()
        attempt("count_error", self._selector.count_dropped, output)
        attempt("depth_error", self._set_depth, output)
        try:
            self._skipping.note_planned(output, len(self.running))
        except Exception:
            self._guard.note("skip_error", exc_info=True)
            self._skipping.reset()
        attempt("timing_error", self._start_clock, now_s, output)
        self._count_planning(started_s)
        return output

    def _skips_planning(self) -> bool:
        """Whether the coming step has nothing to plan."""
        is_watched = self.board.is_watched or (
            self._watchdog is not None and self._watchdog.is_active
        )
        return not is_watched and self._skipping.is_due(*self.get_request_counts())

    def _schedule_unplanned(
        self, now_s: float, *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Schedule as vLLM does for the requests of the step before, at depth 0."""
        output = super().schedule(*args, **kwargs)
        output.num_spec_tokens_to_schedule = 0
        self._skipping.note_unplanned()
        self._guard.attempt("timing_error", self._start_clock, now_s, output)
        return output

    def change_policy(self, section: Mapping[str, Any]) -> None:
        """Change it; of the step under way the new planner is told nothing."""
        super().change_policy(section)
        self._selector.is_planned = False
        self._skipping.reset()

    def _tell_skipped(self) -> None:
        """Tell the planner, and all who take part, of the steps since it was asked."""
        self._guard.ask(self._planner.note_skipped_steps, self._skipping.num_skipped)
        self._skipping.count_into(self.counters)

    def snapshot(self) -> dict[str, Any]:
        """Return counters, the queue and the planner's gauges as plain values."""
        self._skipping.count_into(self.counters)
        snapshot: dict[str, Any] = super().snapshot()
        return snapshot

    def _start_clock(self, now_s: float, output: SchedulerOutput) -> None:
        if self._skipping.is_quiet and not self.board.is_watched:
            setattr(output, QUIET_ATTRIBUTE, True)
        else:
            self._clock.start(now_s, output, self._count_context())

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> dict[int, EngineCoreOutputs]:
        """Learn from raw sampled tokens, before stop strings or limits cut them."""
        outputs: dict[int, EngineCoreOutputs]
        if getattr(scheduler_output, QUIET_ATTRIBUTE, False):
            # There is nothing to learn, nor anybody who watches.
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self._guard.attempt("count_error", self._count_quiet)
            return outputs
        attempt, step = self._guard.attempt, (scheduler_output, model_runner_output)
        started_s = time.perf_counter()
        self._learn(attempt("outcome_error", self._read_outcome, *step))
        self._count_planning(started_s)
        if self.board.is_watched:
            attempt("board_error", self._show, *step)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_spec_tokens_to_schedule == 0:
            # Here, for a step that leaves the drafter out need not be heard of again.
            started_s = time.perf_counter()
            attempt("count_error", self._count_skipped)
            self._count_planning(started_s)
        return outputs

    def _count_quiet(self) -> None:
        """Count a step of which nobody is told anything."""
        if self._skipping.is_unchanged(len(self.running)):
            # Counted with others: after a forward pass counters are far away.
            self._skipping.num_uncounted += 1
        else:
            self.counters.num_steps += 1
            self._count_skipped()

    def _count_skipped(self) -> None:
        """Count, after a step at depth 0, what drafts would have had."""
        if not self._drafter.makes_passes:
            return
        self._skipping.count_into(self.counters)
        num_drafting = len(self._drafts.find_drafting(self.running))
        self._skipping.num_drafting = num_drafting
        self.counters.count_cut("depth", self.num_spec_tokens * num_drafting)

    def _learn_timing(self, now_s: float) -> None:
        timing = self._clock.finish(now_s)
        if timing is not None:
            self._guard.ask(self._planner.observe_timing, timing)

    def _set_depth(self, output: SchedulerOutput) -> None:
        scheduled = [self.requests[r] for r in output.num_scheduled_tokens]
        depth = self._choose_depth(len(scheduled))
        self._depth_orders.give(output, scheduled, depth, self._planner, self._watchdog)

    def _read_outcome(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> VerificationOutcome | None:
        """Count what became of a step's drafts, and return what the policy may learn.

        Nothing where what it knows of these requests is not about these drafts.
        """
        self.counters.num_steps += 1
        if not scheduler_output.scheduled_spec_decode_tokens:
            return None
        found = read_outcomes(scheduler_output, model_runner_output)
        self.counters.count_verification(*found[1:])
        if not self.requests.keys() >= {*found[0]}:
            # A client hung up while the model ran: its request was forgotten.
            found = keep_known(*found, self.requests)
        req_ids, num_verified, num_accepted = found
        if not req_ids:
            return None
        learns = self._guard.attempt(
            "watchdog_error", self._watch, req_ids, num_verified, num_accepted
        )
        if not self._selector.is_planned:
            return replace(NOTHING_VERIFIED, num_unlearnt=sum(num_accepted))
        outcome = VerificationOutcome(
            num_verified=np.array(num_verified, dtype=np.int64),
            num_accepted=np.array(num_accepted, dtype=np.int64),
            req_ids=tuple(req_ids),
        )
        return outcome if learns is None else keep_rows(outcome, learns)

    def _watch(
        self, req_ids: list[str], num_verified: list[int], num_accepted: list[int]
    ) -> list[bool] | None:
        """Show the watchdog a step's outcome; return of whom the planner may learn."""
        if self._watchdog is None:
            return None
        return self._watchdog.observe(
            self.requests, req_ids, num_verified, num_accepted, self._drafts.locate
        )

    def _forget(self, request: Request) -> None:
        self._drafts.forget(request.request_id)
        super()._forget(request)
