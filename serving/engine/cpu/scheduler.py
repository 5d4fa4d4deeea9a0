"""Scheduler, supplied through `scheduler_cls`: vLLM's own, with draft selection."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.types import DraftBatch, DraftSelection, VerificationOutcome
from serving.engine.compat import Scheduler
from serving.engine.cpu.draft_room import DraftRooms
from serving.engine.cpu.drafts import ScoredDraftTokenIds
from serving.engine.cpu.skipped_planning import SkippedPlanning
from serving.engine.cpu.step_clock import StepClock
from serving.engine.cpu.step_messages import QUIET_ATTRIBUTE, STOP_ATTRIBUTE
from serving.engine.cpu.step_sizes import CPU_STEP_SIZES
from serving.engine.shared.coming_prompts import count_coming_prompt_tokens
from serving.engine.shared.faults import check_selection, screen_confidence
from serving.engine.shared.outcomes import read_outcomes
from serving.engine.shared.planner_host import PlannerHost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from policies.decisions.early_exit import EarlyExitRule
    from serving.engine.compat import (
        DraftTokenIds,
        EngineCoreOutputs,
        ModelRunnerOutput,
        Request,
        SchedulerOutput,
    )

_CONFIDENCE_METHODS = frozenset({"draft_model", "eagle", "eagle3", "mtp"})

_STOPPING_METHODS = frozenset({"draft_model", "eagle", "eagle3"})
"""Drafters whose every pass moves the positions on, which is where a draft may end;
some `mtp` models keep theirs."""


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
        speculative = self.vllm_config.speculative_config
        self._clock = StepClock()
        self._drafts_are_sampled = speculative.draft_sample_method == "probabilistic"
        self._method: str = speculative.method
        self._reports_confidence = self._method in _CONFIDENCE_METHODS and not (
            speculative.use_local_argmax_reduction
            or speculative.use_heterogeneous_vocab
            or speculative.parallel_drafting
        )
        # One that drafts all tokens in a single pass has no record of its own, and is
        # never skipped.
        skips_drafter = (
            speculative.uses_draft_model() and not speculative.parallel_drafting
        )
        self._skipping = SkippedPlanning(skips_drafter)
        self._host_planner(
            padded_sizes=CPU_STEP_SIZES,
            skips_drafter=skips_drafter,
            exits_early=self._reports_confidence
            and self._method in _STOPPING_METHODS
            and self.vllm_config.parallel_config.tensor_parallel_size == 1,
        )
        self._policy_selected = False
        # Of each request's latest draft: the confidence, `[num_reqs, depth]`, of the
        # step that drafted, None if not known, and the request's row in it. Kept until
        # the draft is replaced.
        self._pending: dict[str, tuple[NDArray[np.float64] | None, int]] = {}
        self._rooms = DraftRooms(
            self.num_spec_tokens, self.max_model_len, self._find_drafter_limit()
        )

    # The engine core calls these in turn: update_draft_token_ids, schedule,
    # (the model runs), update_from_output.

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Attach new drafts to their requests and keep their confidences."""
        super().update_draft_token_ids(draft_token_ids)
        started_s = time.perf_counter()
        self._guard.attempt("timing_error", self._take_news, draft_token_ids)
        try:
            self._take_drafts(draft_token_ids)
        except Exception:
            self._guard.note("drafts_error", exc_info=True)
            self._take_unseen(draft_token_ids)
        self._count_planning(started_s)

    def _take_news(self, draft_token_ids: DraftTokenIds) -> None:
        """Take in what the worker tells beside its drafts."""
        if isinstance(draft_token_ids, ScoredDraftTokenIds):
            self.counters.num_fallbacks.update(draft_token_ids.faults)
            self._clock.note_worker(draft_token_ids.times)
            if draft_token_ids.profile is not None:
                self._guard.ask(self._planner.fit_profile, draft_token_ids.profile)
        if not self.has_unfinished_requests():
            self._clock.discard()

    def _take_unseen(self, draft_token_ids: DraftTokenIds) -> None:
        """Leave drafts as vLLM attached them, without confidence to select by.

        To drop them instead would let what was drawn decide, if that made the fault.
        """
        is_placeholder = getattr(draft_token_ids, "drafter_skipped", False)
        for row, req_id in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(req_id)
            if request is not None:
                self._pending[req_id] = (None, row)
                if is_placeholder:
                    request.spec_token_ids = []

    def _take_drafts(self, draft_token_ids: DraftTokenIds) -> None:
        skipped = getattr(draft_token_ids, "drafter_skipped", False)
        depth = max(map(len, draft_token_ids.draft_token_ids), default=0)
        self.counters.draft_depth = depth
        confidence = None
        if depth > 0 and not skipped:
            confidence = self._read_confidence(draft_token_ids, depth)
        num_drafting = num_proposed = num_offered = 0
        requests, pending, room_of = self.requests, self._pending, self._rooms.of
        proposed = draft_token_ids.draft_token_ids
        for row, req_id in enumerate(draft_token_ids.req_ids if depth else ()):
            request = requests.get(req_id)
            if request is None or request.is_prefill_chunk or request.is_finished():
                continue
            room = room_of(request)
            num_drafting += not room.opted_out
            drafts = request.spec_token_ids
            num_valid = len(drafts)
            num_proposed += len(proposed[row])
            num_offered += num_valid
            if (
                skipped
                or request.num_tokens > room.num_tokens
                or not room.stop_token_ids.isdisjoint(drafts)
            ):
                num_usable, reason = (
                    (0, "skipped") if skipped else self._rooms.limit(request, num_valid)
                )
                if num_usable < num_valid:
                    self.counters.count_cut(reason, num_valid - num_usable)
                    request.spec_token_ids = drafts[:num_usable]
            pending[req_id] = (confidence, row)
        self.counters.num_proposed_tokens += num_proposed
        self.counters.count_cut("grammar", num_proposed - num_offered)
        if depth > 0 and self._method in _CONFIDENCE_METHODS:
            # What a deeper draft would have had.
            self.counters.count_cut(
                "depth", (self.num_spec_tokens - depth) * num_drafting
            )

    def _count_skipped(self) -> None:
        """Count, after a step at depth 0, what drafts would have had."""
        if self._method not in _CONFIDENCE_METHODS:
            return
        self._skipping.count_into(self.counters)
        room_of = self._rooms.of
        is_drafting = [
            not (request.is_prefill_chunk or room_of(request).opted_out)
            for request in self.running
        ]
        self._skipping.num_drafting = sum(is_drafting)
        self.counters.count_cut(
            "depth", self.num_spec_tokens * self._skipping.num_drafting
        )

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
        try:
            self._select()
        except Exception:
            self._guard.note("selection_error", exc_info=True)
            self._admit_unselected()
        self._plan_batch()
        offered = [(r, len(r.spec_token_ids)) for r in self.running if r.spec_token_ids]
        self._count_planning(now_s)
        output = super().schedule(*args, **kwargs)
        started_s = time.perf_counter()
        attempt("count_error", self._count_dropped, offered, output)
        attempt("depth_error", self._set_depth, output)
        try:
            self._note_planned(output)
        except Exception:
            self._guard.note("skip_error", exc_info=True)
            self._skipping.reset()
        attempt("timing_error", self._start_clock, now_s, output)
        self._count_planning(started_s)
        return output

    def _skips_planning(self) -> bool:
        """Whether the coming step has nothing to plan."""
        return not self.board.is_watched and self._skipping.is_due(
            *self.get_request_counts()
        )

    def _schedule_unplanned(
        self, now_s: float, *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Schedule as vLLM does for the requests of the step before, at depth 0."""
        output = super().schedule(*args, **kwargs)
        output.num_spec_tokens_to_schedule = 0
        self._skipping.note_unplanned()
        self._guard.attempt("timing_error", self._start_clock, now_s, output)
        return output

    def _note_planned(self, output: SchedulerOutput) -> None:
        self._skipping.note_planned(
            output.num_spec_tokens_to_schedule,
            output.total_num_scheduled_tokens,
            len(output.num_scheduled_tokens),
            len(self.running),
        )

    def _tell_skipped(self) -> None:
        """Tell the planner, and all who take part, of the steps since it was asked."""
        num_skipped = self._skipping.num_skipped
        self._guard.ask(self._planner.note_skipped_steps, num_skipped)
        self._pace.note_skipped_steps(num_skipped)
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

    def _read_confidence(
        self, drafts: DraftTokenIds, depth: int
    ) -> NDArray[np.float64] | None:
        """Return the confidence of these drafts, None if there is none to rely on."""
        confidence: NDArray[np.float64] | None = getattr(drafts, "confidence", None)
        if not self._reports_confidence:
            return confidence
        if confidence is None:
            self._guard.note("confidence_missing")
        elif confidence.shape != (len(drafts.req_ids), depth):
            self._guard.note("confidence_invalid")
            confidence = None
        return confidence

    def _select(self) -> None:
        self._policy_selected = False
        self.counters.last_draft_budget = 0
        requests = [r for r in self.running if r.spec_token_ids]
        if not requests:
            return
        started = time.perf_counter()
        batch = self._make_batch(requests)
        selection = None if batch is None else self._guard.ask(self._consult, batch)
        is_selected = selection is not None
        if selection is None:
            lengths = np.array([len(r.spec_token_ids) for r in requests])
            selection = DraftSelection(lengths, draft_budget=int(lengths.sum()))
        if self.board.is_watched:
            self._guard.attempt(
                "board_error",
                self.board.note_drafts,
                {r.request_id: r.spec_token_ids for r in requests},
                None if batch is None else batch.confidence,
                selection.num_admitted.tolist(),
            )
        self._admit(requests, selection)
        self._policy_selected = is_selected
        counters = self.counters
        counters.num_selections += 1
        counters.selection_seconds_total += time.perf_counter() - started
        if not math.isnan(selection.expected_accepted):
            counters.num_expected_accepted += selection.expected_accepted

    def _consult(self, batch: DraftBatch) -> DraftSelection:
        return check_selection(self._planner.select(batch), batch)

    def _admit_unselected(self) -> None:
        """Verify what drafts there are, cut short or not, and learn nothing of it."""
        num_drafts = sum([len(request.spec_token_ids) for request in self.running])
        self._policy_selected = False
        self.counters.last_draft_budget = num_drafts

    def _admit(self, requests: list[Request], selection: DraftSelection) -> None:
        num_admitted = selection.num_admitted.tolist()
        num_cut = 0
        for request, num_kept in zip(requests, num_admitted, strict=True):
            num_offered = len(request.spec_token_ids)
            if num_kept < num_offered:
                num_cut += num_offered - num_kept
                request.spec_token_ids = request.spec_token_ids[:num_kept]
        counters = self.counters
        counters.count_left_out(selection, num_cut)
        counters.last_draft_budget = selection.draft_budget
        counters.draft_budget_total += selection.draft_budget

    def _make_batch(self, requests: list[Request]) -> DraftBatch | None:
        """Describe the drafts; None if a confidence is due and unusable."""
        lengths = [len(request.spec_token_ids) for request in requests]
        num_draft_tokens = np.array(lengths, dtype=np.int64)
        req_ids = [request.request_id for request in requests]
        confidence = None
        if self._reports_confidence:
            confidence = self._gather_confidence(
                req_ids, num_draft_tokens, max(lengths)
            )
            if confidence is None:
                return None
        num_decodes = num_prefill_tokens = num_context_tokens = 0
        for request in self.running:
            num_computed = request.num_computed_tokens
            num_uncomputed = request.num_tokens - num_computed
            num_context_tokens += num_computed
            if num_uncomputed == 1:
                num_decodes += 1
            elif num_uncomputed > 1:
                num_prefill_tokens += num_uncomputed
        if self.waiting:
            num_prefill_tokens += count_coming_prompt_tokens(self)
        return DraftBatch(
            num_draft_tokens=num_draft_tokens,
            confidence=confidence,
            req_ids=tuple(req_ids),
            num_decodes=num_decodes,
            num_prefill_tokens=num_prefill_tokens,
            num_context_tokens=num_context_tokens,
            drafts_are_sampled=self._drafts_are_sampled,
            weights=self._classes.weigh(requests),
            latency_targets_ms=self._classes.targets_ms(requests),
        )

    def _gather_confidence(
        self, req_ids: list[str], num_draft_tokens: NDArray[np.int64], depth: int
    ) -> NDArray[np.float64] | None:
        """Return one row per request, 0 past its drafts; None if one is missing.

        Between steps NumPy falls out of the caches, so that every operation costs about
        10 us, whatever its size: there are as few of them as can be.

        Returns:
            `[num_reqs, depth]`.
        """
        pending = [self._pending[req_id] for req_id in req_ids]
        first = pending[0][0]
        if first is None:
            return None
        rows = [row for confidence, row in pending if confidence is first]
        if len(rows) < len(pending):
            gathered = np.zeros((len(pending), depth))
            for target, (confidence, row) in zip(gathered, pending, strict=True):
                if confidence is None:
                    return None
                width = min(depth, confidence.shape[1])
                target[:width] = confidence[row, :width]
        # The usual cases: all were drafted in the last step, maybe nobody beside them.
        elif (
            first.shape == (len(rows), depth)
            and rows == list(range(len(rows)))
            and first.flags.c_contiguous
        ):
            gathered = first
        else:
            gathered = first[:, :depth].take(rows, axis=0)
        confidence, is_usable = screen_confidence(
            gathered, num_draft_tokens, self._guard
        )
        return confidence if all(is_usable) else None

    def _count_dropped(
        self, offered: list[tuple[Request, int]], output: SchedulerOutput
    ) -> None:
        """Count admitted drafts that vLLM had no room for, or lost by preempting."""
        scheduled = output.scheduled_spec_decode_tokens
        preempted = output.preempted_req_ids or ()
        for request, num_offered in offered:
            num_scheduled = len(scheduled.get(request.request_id, ()))
            # Drafts of a request that was only passed over stay with it.
            num_dropped = num_offered - num_scheduled - len(request.spec_token_ids)
            if num_dropped:
                reason = "kv" if request.request_id in preempted else "scheduler"
                self.counters.count_cut(reason, num_dropped)

    def _learn_timing(self, now_s: float) -> None:
        timing = self._clock.finish(now_s)
        if timing is not None:
            self._guard.ask(self._planner.observe_timing, timing)

    def _set_depth(self, output: SchedulerOutput) -> None:
        depth = self._choose_depth(len(output.num_scheduled_tokens))
        if self._method == "suffix":
            # vLLM's proposer insists on one depth; trimming is all there is.
            depth = self.num_spec_tokens
        if depth is None:
            return
        output.num_spec_tokens_to_schedule = depth
        if depth > 1:
            stop = self._ask_stop(output.num_scheduled_tokens)
            setattr(output, STOP_ATTRIBUTE, stop)

    def _ask_stop(self, req_ids: Iterable[str]) -> EarlyExitRule | None:
        requests, room_of = self.requests, self._rooms.of
        drafting, drafting_ids = [], []
        for req_id in req_ids:
            request = requests[req_id]
            if not (request.is_prefill_chunk or room_of(request).opted_out):
                drafting.append(request)
                drafting_ids.append(req_id)
        stop: EarlyExitRule | None = self._guard.ask(
            self._planner.early_exit,
            tuple(drafting_ids),
            self._classes.weigh(drafting),
        )
        return stop

    def _read_outcome(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> VerificationOutcome | None:
        """Count what became of a step's drafts, and return what the policy may learn.

        None where what it knows of these requests is not about these drafts.
        """
        self.counters.num_steps += 1
        if not scheduler_output.scheduled_spec_decode_tokens:
            return None
        req_ids, num_verified, num_accepted = read_outcomes(
            scheduler_output, model_runner_output
        )
        self.counters.count_verification(num_verified, num_accepted)
        if not self._policy_selected:
            return None
        return VerificationOutcome(
            num_verified=np.array(num_verified, dtype=np.int64),
            num_accepted=np.array(num_accepted, dtype=np.int64),
            req_ids=tuple(req_ids),
        )

    def _forget(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)
        self._rooms.forget(request.request_id)
        super()._forget(request)

    def _find_drafter_limit(self) -> int:
        speculative = self.vllm_config.speculative_config
        draft_config = speculative.draft_model_config
        limit = getattr(draft_config, "max_model_len", None)
        target_limit = int(self.max_model_len)
        if speculative.method in _CONFIDENCE_METHODS and limit is not None:
            return min(int(limit), target_limit)
        return target_limit
