"""Scheduler for GPUs, supplied through `scheduler_cls`: vLLM's asynchronous one."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.decisions.select import select_drafts
from policies.types import DraftBatch, DraftSelection, VerificationOutcome
from serving.engine.compat import AsyncScheduler, check
from serving.engine.compat_names import GPU_SCHEDULER
from serving.engine.gpu.clock import StepLoads
from serving.engine.gpu.plain_verification import find_plain_reason
from serving.engine.gpu.stale_confidence import StaleConfidence
from serving.engine.gpu.step_messages import (
    ORDER_ATTRIBUTE,
    REPORT_ATTRIBUTE,
    StepReport,
    VerificationOrder,
)
from serving.engine.gpu.step_sizes import find_captured_sizes
from serving.engine.shared.coming_prompts import count_coming_prompt_tokens
from serving.engine.shared.draft_batch import describe_drafts
from serving.engine.shared.faults import screen_confidence, select_checked
from serving.engine.shared.options import opts_out
from serving.engine.shared.outcomes import NOTHING_VERIFIED, read_outcomes
from serving.engine.shared.planner_host import PlannerHost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.engine.compat import (
        EngineCoreOutputs,
        ModelRunnerOutput,
        Request,
        SchedulerOutput,
    )

OFFER_SLACK = 1
"""Drafts offered beyond a request's expected share when offers must be trimmed: the
device, which knows better, may still move that many its way."""


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
            raise ValueError(
                "the GPU adapter needs vLLM's asynchronous scheduling, which is off: "
                "remove engine.extra.async_scheduling (and whatever vLLM's log says "
                "turned it off), or set engine.adapter: off with policy.name: fixed"
            )
        self._spec = self._host_planner(
            padded_sizes=find_captured_sizes(self.vllm_config), skips_drafter=False
        )
        self._plain_reason = find_plain_reason(self.vllm_config)
        self._confidence = StaleConfidence(
            self.num_spec_tokens, self.scheduler_config.max_num_seqs
        )
        self._loads = StepLoads()
        self._drafter_limit = self._find_drafter_limit()
        self._safe_until: dict[str, int] = {}
        self._selection: DraftSelection | None = None
        self._selections: dict[int, DraftSelection] = {}
        self._step_id = 0
        self._num_in_flight = 0
        self._after_idle = True

    # The engine core calls these in turn, the second for a step before the one that the
    # first has just scheduled: schedule, update_from_output.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Size the budget, then schedule as vLLM does."""
        started_s = time.perf_counter()
        self._guard.attempt("drafts_error", self._drop_useless_drafts)
        # Behind the last requests of a batch, a step that emits nothing any more may
        # stay in flight until the next batch comes.
        self._after_idle = self._num_in_flight == 0 or not self.running
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
            self._num_in_flight += 1
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
            self._num_in_flight -= 1
            attempt, step = self._guard.attempt, (scheduler_output, model_runner_output)
            report: StepReport | None = getattr(
                model_runner_output, REPORT_ATTRIBUTE, None
            )
            if report is not None:
                attempt("timing_error", self._take_news, report)
            self._learn(attempt("outcome_error", self._read_outcome, *step, report))
            self._count_planning(started_s)
            if self.board.is_watched:
                attempt("board_error", self._show_drafts, *step)
                attempt("board_error", self._show, *step)
                # Steps overlap: one lasts from the output before it to its own.
                attempt("board_error", self.board.start_step)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def _drop_useless_drafts(self) -> None:
        """Drop placeholders past a request's end, and of requests that opted out."""
        safe_until = self._safe_until
        for request in self.running:
            safe = safe_until.get(request.request_id)
            if safe is None:
                safe = self._find_safe_length(request)
                safe_until[request.request_id] = safe
            if request.num_tokens <= safe:
                continue
            num_drafts = len(request.spec_token_ids)
            if not num_drafts:
                continue
            num_usable, reason = self._limit_drafts(request, num_drafts)
            if num_usable < num_drafts:
                self.counters.count_cut(reason, num_drafts - num_usable)
                # A new list: vLLM shares one between all requests.
                request.spec_token_ids = request.spec_token_ids[:num_usable]

    def _find_safe_length(self, request: Request) -> int:
        """Return the tokens up to which all of a request's drafts are of use.

        Worked out once: looking at every request in every step takes long in a large
        batch, and only the end of a request is in question.
        """
        params = request.sampling_params
        if params is not None and opts_out(params.extra_args):
            return -1
        end = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return int(min(end - 2, self._drafter_limit) - self.num_spec_tokens)

    def _limit_drafts(self, request: Request, num_drafts: int) -> tuple[int, str]:
        """Return how many drafts can be of any use and why the others are not.

        Every step in flight will emit a token at least. `min_tokens` needs no care: the
        V2 sampler bars stop tokens position by position.
        """
        params = request.sampling_params
        if params is not None and opts_out(params.extra_args):
            return 0, "opt_out"
        in_flight = min(1, request.num_output_placeholders)
        num_left = min(
            request.max_tokens - request.num_output_tokens,
            self.max_model_len - request.num_tokens,
        )
        num_usable = min(
            num_drafts,
            num_left - in_flight - 1,
            self._drafter_limit + 1 - request.num_tokens - in_flight,
        )
        return max(0, num_usable), "length"

    def _select(self) -> DraftSelection | None:
        """Ask the planner for a budget; None verifies all that is scheduled."""
        self.counters.last_draft_budget = 0
        requests = [request for request in self.running if request.spec_token_ids]
        if not requests:
            return None
        if self._plain_reason is not None:
            self._guard.note(f"plain_{self._plain_reason}")
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
            if selection.may_reallocate:
                self._trim_offers(requests, batch, selection)
            else:
                self._offer(requests, selection.num_admitted)
        return selection

    def _make_batch(self, requests: list[Request]) -> DraftBatch:
        lengths = np.array([len(r.spec_token_ids) for r in requests], dtype=np.int64)
        req_ids = [request.request_id for request in requests]
        return describe_drafts(
            self,
            self._classes,
            requests,
            lengths,
            self._confidence.guess(req_ids, int(lengths.max())),
            # The confidences are older than the drafts, sampled or not: a budget from
            # them is known before any of the drafts is drawn.
            drafts_are_sampled=False,
        )

    def _trim_offers(
        self, requests: list[Request], batch: DraftBatch, selection: DraftSelection
    ) -> None:
        """Let prompts have the room of drafts that will not be verified.

        vLLM charges every placeholder to the step's token limit. Only where that limit
        is in sight, each request offers what it is expected to get and a little more;
        elsewhere all, so that the device has the choice. Decided by confidences older
        than the drafts.
        """
        num_offered = int(batch.num_draft_tokens.sum())
        # Some drafters need slots beside the tokens; vLLM charges those as well.
        speculative = self.vllm_config.speculative_config
        num_slots = 1 + speculative.max_num_new_slots_for_drafting
        num_others = num_slots * len(self.running) + batch.num_prefill_tokens
        limit = self.max_num_scheduled_tokens
        num_waiting = 0
        for request in self.waiting:
            if num_offered + num_others + num_waiting > limit:
                break
            num_waiting += request.num_prompt_tokens
        if num_offered + num_others + num_waiting <= limit:
            return
        assert batch.confidence is not None
        offers = np.minimum(
            batch.num_draft_tokens, selection.num_admitted + OFFER_SLACK
        )
        survival = batch.confidence.cumprod(axis=1)
        room = max(selection.draft_budget, limit - num_others - num_waiting)
        self._offer(
            requests, select_drafts(survival, offers, min(room, int(offers.sum())))
        )

    def _offer(self, requests: list[Request], offers: NDArray[np.int64]) -> None:
        """Let each request have no more drafts verified than this."""
        for request, num_offers in zip(requests, offers.tolist(), strict=True):
            num_dropped = len(request.spec_token_ids) - num_offers
            if num_dropped > 0:
                self.counters.count_cut("budget", num_dropped)
                request.spec_token_ids = request.spec_token_ids[:num_offers]

    def _set_depth(self, output: SchedulerOutput) -> None:
        num_reqs = len(output.num_scheduled_tokens)
        depth = (
            min(self._spec.max_depth, self.num_spec_tokens)
            if self._plain_reason is not None
            else self._choose_depth(num_reqs)
        )
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
        drafts = output.scheduled_spec_decode_tokens
        num_drafts = sum(map(len, drafts.values()))
        selection, draft_budget = self._selection, num_drafts
        if selection is not None:
            if selection.may_reallocate:
                draft_budget = min(selection.draft_budget, num_drafts)
            if not math.isnan(selection.expected_accepted):
                self.counters.num_expected_accepted += selection.expected_accepted
        self._step_id += 1
        req_ids = tuple(output.num_scheduled_tokens)
        scale, weights = None, None
        if draft_budget < num_drafts:
            scale = self._guard.ask(self._planner.acceptance_scale, req_ids)
            weights = self._classes.weigh([self.requests[r] for r in req_ids])
        order = VerificationOrder(self._step_id, draft_budget, req_ids, scale, weights)
        setattr(output, ORDER_ATTRIBUTE, order)
        if selection is not None:
            self._selections[self._step_id] = selection
        counters = self.counters
        counters.last_draft_budget = draft_budget
        counters.draft_budget_total += draft_budget
        self._loads.note(
            self._step_id,
            output,
            draft_budget=draft_budget,
            num_context_tokens=self._count_context(),
            after_idle=self._after_idle,
        )

    def _take_news(self, report: StepReport) -> None:
        self.counters.num_fallbacks.update(report.faults)
        if report.plain_reason is not None:
            self._plain_reason = report.plain_reason
        if report.profile is not None:
            self._guard.ask(self._planner.fit_profile, report.profile)
        for times in report.times:
            timing = self._loads.match(times)
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
        order: VerificationOrder | None = getattr(
            scheduler_output, ORDER_ATTRIBUTE, None
        )
        selection = None
        if order is not None:
            selection = self._selections.pop(order.step_id, None)
        verification = None if report is None else report.verification
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        req_ids, num_drafts, num_accepted = read_outcomes(
            scheduler_output, model_runner_output
        )
        num_verified = num_drafts
        outcome = NOTHING_VERIFIED
        if verification is not None and req_ids:
            drafts = np.array(num_drafts, dtype=np.int64)
            row_of = {req_id: row for row, req_id in enumerate(verification.req_ids)}
            rows = np.array([row_of.get(r, -1) for r in req_ids], dtype=np.int64)
            is_reported = rows >= 0
            verified = np.where(is_reported, verification.num_admitted[rows], drafts)
            num_verified = verified.tolist()
            # A request that has ended was forgotten, though a step was in flight.
            is_known = [req_id in self.requests for req_id in req_ids]
            known = np.flatnonzero(is_reported & is_known)
            confidence, is_usable = screen_confidence(
                verification.confidence[rows[known]].astype(np.float64),
                drafts[known],
                self._guard,
            )
            if not all(is_usable):
                known, confidence = known[is_usable], confidence[is_usable]
            self._confidence.note(
                [req_ids[index] for index in known], confidence, drafts[known]
            )
            if invalid:
                # A draft that a grammar forbade says nothing about the drafter.
                is_valid = [req_ids[index] not in invalid for index in known]
                known, confidence = known[is_valid], confidence[is_valid]
            outcome = VerificationOutcome(
                num_verified=verified[known],
                num_accepted=np.array(num_accepted, dtype=np.int64)[known],
                req_ids=tuple(req_ids[index] for index in known),
                confidence=confidence,
            )
        self._count_left_out(selection, sum(num_drafts) - sum(num_verified))
        if invalid:
            # What a grammar forbids is the end of a draft, as is what was left out.
            num_valid = [
                min(verified, drafts - invalid.get(req_id, 0))
                for req_id, drafts, verified in zip(
                    req_ids, num_drafts, num_verified, strict=True
                )
            ]
            self.counters.count_cut("grammar", sum(num_verified) - sum(num_valid))
            num_verified = num_valid
        self.counters.count_verification(num_verified, num_accepted)
        return outcome

    def _count_left_out(self, selection: DraftSelection | None, num_cut: int) -> None:
        """Count what the device left out, for the reason that its budget had."""
        if selection is None:
            self.counters.count_cut("budget", num_cut)
        else:
            self.counters.count_left_out(selection, num_cut)

    def _show_drafts(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> None:
        """Put on the board what the device admitted of a step's drafts."""
        report: StepReport | None = getattr(model_runner_output, REPORT_ATTRIBUTE, None)
        verification = None if report is None else report.verification
        if verification is None:
            return
        drafts = scheduler_output.scheduled_spec_decode_tokens
        rows = [row for row, r in enumerate(verification.req_ids) if drafts.get(r)]
        self.board.note_drafts(
            {
                verification.req_ids[row]: drafts[verification.req_ids[row]]
                for row in rows
            },
            verification.confidence[rows].astype(np.float64),
            verification.num_admitted[rows].tolist(),
        )

    def _forget(self, request: Request) -> None:
        self._confidence.forget(request.request_id)
        self._safe_until.pop(request.request_id, None)
        super()._forget(request)

    def _find_drafter_limit(self) -> int:
        draft_config = self.vllm_config.speculative_config.draft_model_config
        limit = getattr(draft_config, "max_model_len", None) or self.max_model_len
        return min(int(limit), self.max_model_len)
