"""The latest draft of every request: what of it is of use, and how sure it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.engine.cpu.draft_room import DraftRooms
from serving.engine.shared.faults import screen_confidence
from serving.engine.shared.watchdog import Drafts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from serving.engine.compat import DraftTokenIds, Request
    from serving.engine.cpu.drafter_traits import DrafterTraits
    from serving.engine.shared.counters import SpeculationCounters
    from serving.engine.shared.faults import FaultGuard


class PendingDrafts:
    """Takes in what the drafter made, and keeps its confidences until it drafts again.

    Attributes:
        rooms: What limits each request's drafts.
    """

    def __init__(
        self,
        traits: DrafterTraits,
        target_limit: int,
        counters: SpeculationCounters,
        guard: FaultGuard,
    ) -> None:
        """Keep nothing yet.

        Args:
            traits: The drafter's.
            target_limit: Tokens of prompt and output that the target takes.
            counters: Count what is proposed, and what of it is cut here.
            guard: Counts confidences that are missing or none.
        """
        self.rooms = DraftRooms(traits.max_depth, target_limit, traits.max_model_len)
        self._traits = traits
        self._counters = counters
        self._guard = guard
        # Of each request: the confidence, `[num_reqs, depth]`, of the step that
        # drafted, None if not known, and the request's row in it.
        self._pending: dict[str, tuple[NDArray[np.float64] | None, int]] = {}

    def __len__(self) -> int:
        """Return how many requests something is kept about."""
        return len(self._pending)

    def take(
        self, draft_token_ids: DraftTokenIds, requests: Mapping[str, Request]
    ) -> None:
        """Keep the confidences of new drafts, and cut what cannot be used of them.

        Args:
            draft_token_ids: From the worker; vLLM has attached them to their requests.
            requests: By id.
        """
        skipped = getattr(draft_token_ids, "drafter_skipped", False)
        depth = max(map(len, draft_token_ids.draft_token_ids), default=0)
        counters = self._counters
        counters.draft_depth = depth
        confidence = None
        if depth > 0 and not skipped:
            confidence = self._read_confidence(draft_token_ids, depth)
        num_drafting = num_proposed = num_offered = 0
        pending, room_of = self._pending, self.rooms.of
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
                    (0, "skipped") if skipped else self.rooms.limit(request, num_valid)
                )
                if num_usable < num_valid:
                    counters.count_cut(reason, num_valid - num_usable)
                    request.spec_token_ids = drafts[:num_usable]
            pending[req_id] = (confidence, row)
        counters.num_proposed_tokens += num_proposed
        counters.count_cut("grammar", num_proposed - num_offered)
        if depth > 0 and self._traits.makes_passes:
            # What a deeper draft would have had.
            num_undrafted = (self._traits.max_depth - depth) * num_drafting
            counters.count_cut("depth", num_undrafted)

    def take_unseen(
        self, draft_token_ids: DraftTokenIds, requests: Mapping[str, Request]
    ) -> None:
        """Leave drafts as vLLM attached them, without confidence to select by.

        To drop them instead would let what was drawn decide, if that made the fault.
        """
        is_placeholder = getattr(draft_token_ids, "drafter_skipped", False)
        for row, req_id in enumerate(draft_token_ids.req_ids):
            request = requests.get(req_id)
            if request is not None:
                self._pending[req_id] = (None, row)
                if is_placeholder:
                    request.spec_token_ids = []

    def gather(
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

    def locate(self, req_ids: Sequence[str]) -> Drafts:
        """Return where the confidences of requests are that were drafted together.

        Those of an earlier draft are left out.
        """
        pending = [self._pending[req_id] for req_id in req_ids]
        latest = pending[0][0] if pending else None
        if latest is None or not latest.flags.c_contiguous:
            is_due = self._traits.reports_confidence
            return Drafts.without_confidence(len(req_ids), is_due=is_due)
        return Drafts(latest, [row if one is latest else -1 for one, row in pending])

    def find_drafting(self, requests: Iterable[Request]) -> list[Request]:
        """Return those that a draft can be made for."""
        return self.rooms.select_drafting(requests)

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended."""
        self._pending.pop(req_id, None)
        self.rooms.forget(req_id)

    def _read_confidence(
        self, drafts: DraftTokenIds, depth: int
    ) -> NDArray[np.float64] | None:
        """Return the confidence of these drafts, None if there is none to rely on."""
        confidence: NDArray[np.float64] | None = getattr(drafts, "confidence", None)
        if not self._traits.reports_confidence:
            return confidence
        if confidence is None:
            self._guard.note("confidence_missing")
        elif confidence.shape != (len(drafts.req_ids), depth):
            self._guard.note("confidence_invalid")
            confidence = None
        return confidence
