"""Scheduler for GPUs, supplied through `scheduler_cls`: vLLM's asynchronous one."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from policies.types import DraftBatch, DraftSelection, VerificationOutcome
from serving.engine.compat import AsyncScheduler, check
from serving.engine.compat_names import GPU_SCHEDULER
from serving.engine.gpu.offers import DraftOffers
from serving.engine.gpu.orders import IssuedOrders
from serving.engine.gpu.outcomes import OutcomeReader, show_drafts
from serving.engine.gpu.plain_verification import find_plain_reason
from serving.engine.gpu.step_messages import (
    REPORT_ATTRIBUTE,
    StepReport,
    VerificationOrder,
)
from serving.engine.gpu.step_sizes import find_captured_sizes
from serving.engine.shared.coming_prompts import count_coming_prompt_tokens
from serving.engine.shared.draft_batch import describe_drafts
from serving.engine.shared.faults import select_checked
from serving.engine.shared.outcomes import keep_rows
from serving.engine.shared.planner_host import PlannerHost
from serving.engine.shared.watchdog import Drafts

if TYPE_CHECKING:
    from serving.engine.compat import (
        EngineCoreOutputs,
        ModelRunnerOutput,
        Request,
        SchedulerOutput,
    )

_NEEDS_ASYNC: Final = (
    "the GPU adapter needs vLLM's asynchronous scheduling, which is off: remove "
    "engine.extra.async_scheduling (and whatever vLLM's log says turned it off), or "
    "set engine.adapter: off with policy.name: fixed"
)


class TetrisAsyncScheduler(PlannerHost, AsyncScheduler):
    """vLLM's asynchronous scheduler, ordering how many drafts a step verifies.

    While a step is scheduled, the one before is running: its drafts exist on the
    device alone. So this scheduler decides how many drafts of the batch are verified
    and how deep to draft, from the latest reports; the device decides which, from the
    drafts themselves. The decision travels with the step: every rank receives the same.

    Changes against upstream, all before or after its own methods:
        `schedule`: drops placeholder drafts that cannot be used; where a step would be
            full, offers only about what will be verified.
        `_update_after_schedule`: sets the next draft depth and attaches the order.
        `update_from_output`: counts and learns from the worker's report.
    Where drafts cannot be left out on the device (`plain_verification`), or a policy
    fails, a step verifies all its drafts, and a counter says why.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the planner the engine's configuration names.

        Raises:
            ValueError: If the configuration cannot work.
        """
        check(GPU_SCHEDULER)
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            raise ValueError(_NEEDS_ASYNC)
        self._set_up()

    def change_policy(self, section: Any) -> None:
        """Refuse: steps are on their way that another planner has decided."""
        del section
        raise ValueError("a GPU's engine changes its policy only at a start; redeploy")

    def _set_up(self) -> None:
        """Build the planner, and all that prepares and carries out what it decides."""
        self._spec = self._host_planner(
            padded_sizes=find_captured_sizes(self.vllm_config), skips_drafter=False
        )
        self._plain_reason = find_plain_reason(self.vllm_config)
        self._offers = DraftOffers(self, self.counters)
        self._orders = IssuedOrders()
        self._outcomes = OutcomeReader(
            self.num_spec_tokens,
            self.scheduler_config.max_num_seqs,
            self.counters,
            self._guard,
        )
        self._selection: DraftSelection | None = None

    # The engine core calls these in turn, the second for a step before the one that the
    # first has just scheduled: schedule, update_from_output.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Size the budget, then schedule as vLLM does."""
        started_s = time.perf_counter()
        is_plain = self._plain_reason is not None
        drop = partial(self._offers.drop_useless, keeps_length=is_plain)
        self._guard.attempt("drafts_error", drop)
        self._guard.attempt(
            "watchdog_error", self._begin_watching, self._offers.can_draft
        )
        self._orders.begin(len(self.running))
        self._selection = self._guard.attempt("selection_error", self._select)
        self._batch.plan(self._planner)
        self._count_planning(started_s)
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Decide what follows from what was scheduled, before vLLM's bookkeeping.

        vLLM sizes the placeholders of the next step's drafts by the depth set here.
        """
        if scheduler_output.total_num_scheduled_tokens > 0:
            started_s = time.perf_counter()
            self._orders.note_sent()
            self._guard.attempt("depth_error", self._set_depth, scheduler_output)
            self._guard.attempt("order_error", self._give_order, scheduler_output)
            self._count_planning(started_s)
        super()._update_after_schedule(scheduler_output)
        self._guard.attempt("count_error", self._count_proposed, scheduler_output)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> dict[int, EngineCoreOutputs]:
        """Learn from raw sampled tokens, before stop strings or limits cut them."""
        if scheduler_output.total_num_scheduled_tokens > 0:
            started_s = time.perf_counter()
            self._orders.note_returned()
            attempt, step = self._guard.attempt, (scheduler_output, model_runner_output)
            report: StepReport | None = getattr(
                model_runner_output, REPORT_ATTRIBUTE, None
            )
            if report is not None:
                attempt("timing_error", self._take_news, report)
            self._learn(attempt("outcome_error", self._read_outcome, *step, report))
            self._count_planning(started_s)
            if self.board.is_watched:
                attempt(
                    "board_error", show_drafts, self.board, scheduler_output, report
                )
                attempt("board_error", self._show, *step)
                # Steps overlap: one lasts from the output before it to its own.
                attempt("board_error", self.board.start_step)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def _select(self) -> DraftSelection | None:
        """Ask the planner for a budget; None verifies all that is scheduled."""
        self.counters.last_draft_budget = 0
        requests = [request for request in self.running if request.spec_token_ids]
        if not requests:
            return None
        if self._plain_reason is not None:
            self._guard.note(f"plain_{self._plain_reason}")
            return None
        if self._probes:
            # The device would choose among them.
            return None
        started = time.perf_counter()
        selection = self._consult(requests)
        self.counters.num_selections += 1
        self.counters.selection_seconds_total += time.perf_counter() - started
        return selection

    def _consult(self, requests: list[Request]) -> DraftSelection | None:
        batch = self._make_batch(requests)
        joined = batch
        if self.waiting:
            num_coming = count_coming_prompt_tokens(self)
            joined = replace(
                batch, num_prefill_tokens=batch.num_prefill_tokens + num_coming
            )
        selection: DraftSelection | None = self._guard.ask(
            select_checked, self._planner, joined
        )
        if selection is not None:
            self._offers.trim(requests, batch, selection)
        return selection

    def _make_batch(self, requests: list[Request]) -> DraftBatch:
        lengths = np.array([len(r.spec_token_ids) for r in requests], dtype=np.int64)
        req_ids = [request.request_id for request in requests]
        return describe_drafts(
            self,
            self._classes,
            requests,
            lengths,
            self._outcomes.confidence.guess(req_ids, int(lengths.max())),
            # The confidences are older than the drafts, sampled or not: a budget from
            # them is known before any of the drafts is drawn.
            drafts_are_sampled=False,
        )

    def _set_depth(self, output: SchedulerOutput) -> None:
        if self._plain_reason is None:
            depth = self._choose_depth(len(output.num_scheduled_tokens))
        else:
            depth = min(self._spec.max_depth, self.num_spec_tokens)
        if depth is not None:
            output.num_spec_tokens_to_schedule = depth
        self.counters.draft_depth = output.num_spec_tokens_to_schedule

    def _count_proposed(self, output: SchedulerOutput) -> None:
        """Count what this step will draft and what not; prompts that go on do neither.

        What requests that opted out, or end, cannot use is counted when it is dropped.
        """
        num_drafting = sum(
            not self.requests[req_id].is_prefill_chunk
            for req_id in output.num_scheduled_tokens
        )
        depth = output.num_spec_tokens_to_schedule
        self.counters.num_proposed_tokens += depth * num_drafting
        self.counters.count_cut("depth", (self.num_spec_tokens - depth) * num_drafting)

    def _give_order(self, output: SchedulerOutput) -> None:
        """Attach the budget, and how to rank, to what was scheduled."""
        counters, selection = self.counters, self._selection
        drafts = output.scheduled_spec_decode_tokens
        draft_budget = num_drafts = sum(map(len, drafts.values()))
        if selection is not None:
            if selection.may_reallocate:
                draft_budget = min(selection.draft_budget, num_drafts)
            if not math.isnan(selection.expected_accepted):
                counters.num_expected_accepted += selection.expected_accepted
        req_ids = tuple(output.num_scheduled_tokens)
        scale, weights = None, None
        if draft_budget < num_drafts:
            scale = self._guard.ask(self._planner.acceptance_scale, req_ids)
            weights = self._classes.weigh([self.requests[r] for r in req_ids])
        order = VerificationOrder(
            self._orders.next_id(), draft_budget, req_ids, scale, weights
        )
        counters.last_draft_budget = draft_budget
        counters.draft_budget_total += draft_budget
        self._orders.issue(order, output, selection, self._count_context())

    def _take_news(self, report: StepReport) -> None:
        self.counters.num_fallbacks.update(report.faults)
        if report.plain_reason is not None:
            self._plain_reason = report.plain_reason
        if report.profile is not None:
            self._guard.ask(self._planner.fit_profile, report.profile)
        for times in report.times:
            timing = self._orders.loads.match(times)
            if timing is not None:
                self._guard.ask(self._planner.observe_timing, timing)

    def _read_outcome(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        report: StepReport | None,
    ) -> VerificationOutcome:
        """Count what became of a step's drafts, and return what can be learnt."""
        self.counters.num_steps += 1
        outcome = self._outcomes.read(
            scheduler_output,
            model_runner_output,
            None if report is None else report.verification,
            self._orders.take_selection(scheduler_output),
            self.requests,
        )
        learns = self._guard.attempt("watchdog_error", self._watch, outcome)
        return outcome if learns is None else keep_rows(outcome, learns)

    def _watch(self, outcome: VerificationOutcome) -> list[bool] | None:
        """Show the watchdog a step's outcome; return of whom the planner may learn."""
        confidence = outcome.confidence
        if self._watchdog is None or confidence is None:
            return None
        confidence = np.ascontiguousarray(confidence)
        rows = {str(req_id): row for row, req_id in enumerate(outcome.req_ids)}
        return self._watchdog.observe(
            self.requests,
            list(rows),
            outcome.num_verified.tolist(),
            outcome.num_accepted.tolist(),
            lambda req_ids: Drafts(confidence, [rows[req_id] for req_id in req_ids]),
        )

    def _forget(self, request: Request) -> None:
        self._outcomes.confidence.forget(request.request_id)
        self._offers.forget(request.request_id)
        super()._forget(request)
