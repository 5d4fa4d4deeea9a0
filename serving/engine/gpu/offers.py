"""What of the placeholders for coming drafts vLLM is offered to schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.select import select_drafts
from serving.engine.gpu.plain_verification import METHODS_ON_TARGETS_POSITIONS
from serving.engine.shared.options import opts_out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.types import DraftBatch, DraftSelection
    from serving.engine.compat import Request, Scheduler
    from serving.engine.shared.counters import SpeculationCounters

OFFER_SLACK = 1
"""Drafts offered beyond a request's expected share when offers must be trimmed: the
device, which knows better, may still move that many its way."""


class DraftOffers:
    """Shortens placeholders that cannot be used, or that would keep prompts out."""

    def __init__(self, scheduler: Scheduler, counters: SpeculationCounters) -> None:
        """Offer the drafts of this scheduler's requests."""
        speculative = scheduler.vllm_config.speculative_config
        self._scheduler = scheduler
        self._counters = counters
        limit = getattr(speculative.draft_model_config, "max_model_len", None)
        if limit is None or speculative.method in METHODS_ON_TARGETS_POSITIONS:
            limit = scheduler.max_model_len
        self._drafter_limit = min(int(limit), scheduler.max_model_len)
        # Some drafters need slots beside the tokens; vLLM charges those as well.
        self._num_slots: int = 1 + speculative.max_num_new_slots_for_drafting
        self._safe_until: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many requests something is kept about."""
        return len(self._safe_until)

    def drop_useless(self, *, keeps_length: bool) -> None:
        """Drop placeholders past a request's end, and of requests that opted out.

        Args:
            keeps_length: Leave those past an end: where all requests verify equally
                many, vLLM replays the whole step, and else only parts of it.
        """
        safe_until = self._safe_until
        for request in self._scheduler.running:
            safe = safe_until.get(request.request_id)
            if safe is None:
                safe = self._find_safe_length(request)
                safe_until[request.request_id] = safe
            if request.num_tokens <= safe:
                continue
            num_drafts = len(request.spec_token_ids)
            if not num_drafts:
                continue
            num_usable, reason = self._limit(request, num_drafts)
            if keeps_length and reason == "length":
                continue
            if num_usable < num_drafts:
                self._counters.count_cut(reason, num_drafts - num_usable)
                # A new list: vLLM shares one between all requests.
                request.spec_token_ids = request.spec_token_ids[:num_usable]

    def can_draft(self, request: Request, position: int) -> bool:
        """Tell whether a draft at a position, 0 for the first, can be of use."""
        num_usable, _ = self._limit(request, position + 1)
        return num_usable > position and not request.is_prefill_chunk

    def _offer(self, requests: list[Request], offers: NDArray[np.int64]) -> None:
        """Let each request have no more drafts verified than this."""
        for request, num_offers in zip(requests, offers.tolist(), strict=True):
            num_dropped = len(request.spec_token_ids) - num_offers
            if num_dropped > 0:
                self._counters.count_cut("budget", num_dropped)
                request.spec_token_ids = request.spec_token_ids[:num_offers]

    def trim(
        self, requests: list[Request], batch: DraftBatch, selection: DraftSelection
    ) -> None:
        """Let prompts have the room of drafts that will not be verified.

        Where the device may not choose among drafts, each request offers its own part.

        vLLM charges every placeholder to the step's token limit. Only where that limit
        is in sight, each request offers what it is expected to get and a little more;
        elsewhere all, so that the device has the choice. Decided by confidences older
        than the drafts.

        Args:
            requests: `[num_reqs]`, those with drafts.
            batch: Their drafts, without prompts that wait.
            selection: Made for them.
        """
        if not selection.may_reallocate:
            self._offer(requests, selection.num_admitted)
            return
        scheduler = self._scheduler
        num_offered = int(batch.num_draft_tokens.sum())
        num_others = self._num_slots * len(scheduler.running) + batch.num_prefill_tokens
        limit: int = scheduler.max_num_scheduled_tokens
        num_waiting = 0
        for request in scheduler.waiting:
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

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended."""
        self._safe_until.pop(req_id, None)

    def _find_safe_length(self, request: Request) -> int:
        """Return the tokens up to which all of a request's drafts are of use.

        Worked out once: looking at every request in every step takes long in a large
        batch, and only the end of a request is in question.
        """
        scheduler, params = self._scheduler, request.sampling_params
        if params is not None and opts_out(params.extra_args):
            return -1
        end = min(
            request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len
        )
        return int(min(end - 2, self._drafter_limit) - scheduler.num_spec_tokens)

    def _limit(self, request: Request, num_drafts: int) -> tuple[int, str]:
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
            self._scheduler.max_model_len - request.num_tokens,
        )
        num_usable = min(
            num_drafts,
            num_left - in_flight - 1,
            self._drafter_limit + 1 - request.num_tokens - in_flight,
        )
        return max(0, num_usable), "length"
