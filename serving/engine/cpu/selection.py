"""Which drafts the coming step verifies: the planner's choice, applied and counted."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from policies.types import DraftSelection
from serving.engine.cpu.drafter_traits import GREEDY_BELOW
from serving.engine.shared.coming_prompts import count_coming_prompt_tokens
from serving.engine.shared.draft_batch import describe_drafts
from serving.engine.shared.faults import select_checked

if TYPE_CHECKING:
    from collections.abc import Set

    from policies.planner import Planner
    from policies.types import DraftBatch
    from serving.engine.compat import Request, Scheduler, SchedulerOutput
    from serving.engine.cpu.drafter_traits import DrafterTraits
    from serving.engine.cpu.pending_drafts import PendingDrafts
    from serving.engine.shared.board import BoardRecorder
    from serving.engine.shared.counters import SpeculationCounters
    from serving.engine.shared.faults import FaultGuard
    from serving.engine.shared.request_classes import RequestClasses


class DraftSelector:
    """Trims the drafts of the running requests to what the planner admits.

    Attributes:
        is_planned: Whether the latest choice was the planner's, who may learn from it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafts: PendingDrafts,
        traits: DrafterTraits,
        *,
        classes: RequestClasses,
        counters: SpeculationCounters,
        guard: FaultGuard,
        board: BoardRecorder,
    ) -> None:
        """Select for this scheduler."""
        self.is_planned = False
        self._scheduler = scheduler
        self._drafts = drafts
        self._traits = traits
        self._classes = classes
        self._counters = counters
        self._guard = guard
        self._board = board
        self._offered: list[tuple[Request, int]] = []

    def select(self, planner: Planner, probes: Set[str]) -> None:
        """Ask for a selection and apply it; without one everything is verified.

        Drafts of `probes` are verified in any case; the planner is not told of them.
        """
        self.is_planned = False
        counters = self._counters
        counters.last_draft_budget = 0
        requests = [r for r in self._scheduler.running if r.spec_token_ids]
        num_probes = 0
        if probes:
            num_probes = sum(
                [len(r.spec_token_ids) for r in requests if r.request_id in probes]
            )
            counters.last_draft_budget = num_probes
            counters.draft_budget_total += num_probes
            requests = [r for r in requests if r.request_id not in probes]
        if not requests:
            return
        started = time.perf_counter()
        batch = self._make_batch(requests)
        selection = None
        if batch is not None:
            selection = self._guard.ask(select_checked, planner, batch)
        is_planned = selection is not None
        if selection is None:
            lengths = np.array([len(r.spec_token_ids) for r in requests])
            selection = DraftSelection(lengths, draft_budget=int(lengths.sum()))
        if self._board.is_watched:
            self._guard.attempt(
                "board_error",
                self._board.note_drafts,
                {r.request_id: r.spec_token_ids for r in requests},
                None if batch is None else batch.confidence,
                selection.num_admitted.tolist(),
            )
        self._admit(requests, selection)
        counters.last_draft_budget += num_probes
        self.is_planned = is_planned
        counters.num_selections += 1
        counters.selection_seconds_total += time.perf_counter() - started
        if not math.isnan(selection.expected_accepted):
            counters.num_expected_accepted += selection.expected_accepted

    def admit_unselected(self) -> None:
        """Verify what drafts there are, cut short or not, and learn nothing of it."""
        running = self._scheduler.running
        num_drafts = sum([len(request.spec_token_ids) for request in running])
        self.is_planned = False
        self._counters.last_draft_budget = num_drafts

    def note_offered(self) -> None:
        """Remember what vLLM is offered, before it schedules."""
        running = self._scheduler.running
        self._offered = [
            (r, len(r.spec_token_ids)) for r in running if r.spec_token_ids
        ]

    def count_dropped(self, output: SchedulerOutput) -> None:
        """Count admitted drafts that vLLM had no room for, or lost by preempting."""
        scheduled = output.scheduled_spec_decode_tokens
        preempted = output.preempted_req_ids or ()
        for request, num_offered in self._offered:
            num_scheduled = len(scheduled.get(request.request_id, ()))
            # Drafts of a request that was only passed over stay with it.
            num_dropped = num_offered - num_scheduled - len(request.spec_token_ids)
            if num_dropped:
                reason = "kv" if request.request_id in preempted else "scheduler"
                self._counters.count_cut(reason, num_dropped)

    def _admit(self, requests: list[Request], selection: DraftSelection) -> None:
        num_admitted = selection.num_admitted.tolist()
        num_cut = 0
        for request, num_kept in zip(requests, num_admitted, strict=True):
            num_offered = len(request.spec_token_ids)
            if num_kept < num_offered:
                num_cut += num_offered - num_kept
                request.spec_token_ids = request.spec_token_ids[:num_kept]
        counters = self._counters
        counters.count_left_out(selection, num_cut)
        counters.last_draft_budget = selection.draft_budget
        counters.draft_budget_total += selection.draft_budget

    def _make_batch(self, requests: list[Request]) -> DraftBatch | None:
        """Describe the drafts; None if a confidence is due and unusable."""
        lengths = [len(request.spec_token_ids) for request in requests]
        num_draft_tokens = np.array(lengths, dtype=np.int64)
        confidence = None
        if self._traits.reports_confidence:
            req_ids = [request.request_id for request in requests]
            confidence = self._drafts.gather(req_ids, num_draft_tokens, max(lengths))
            if confidence is None:
                return None
        scheduler = self._scheduler
        return describe_drafts(
            scheduler,
            self._classes,
            requests,
            num_draft_tokens,
            confidence,
            # What is drafted at temperature 0 is a function of the text.
            drafts_are_sampled=self._traits.is_sampled
            and any(
                one.sampling_params.temperature >= GREEDY_BELOW for one in requests
            ),
            num_coming_tokens=(
                count_coming_prompt_tokens(scheduler) if scheduler.waiting else 0
            ),
        )
