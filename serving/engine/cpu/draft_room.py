"""How many of a request's drafts can be of any use, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.engine.shared.options import find_stop_token_ids, opts_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm import SamplingParams

    from serving.engine.compat import Request


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """What can limit a request's drafts; found once, looked at in every step.

    Attributes:
        params: The request's, which change if it is continued.
        opted_out: The request wants no speculation.
        num_tokens: Up to this many tokens, prompt and output, the deepest draft is
            within all limits; -1 where each step has to look.
        stop_token_ids: That end it.
    """

    params: SamplingParams | None
    opted_out: bool
    num_tokens: int
    stop_token_ids: frozenset[int | None]


@dataclass(slots=True)
class DraftRooms:
    """The room of every request of an engine.

    Attributes:
        max_depth: Deepest draft.
        max_model_len: Tokens of prompt and output that the target takes.
        drafter_limit: The same for the drafter: a draft past it was made from a
            clamped position.
    """

    max_depth: int
    max_model_len: int
    drafter_limit: int
    _rooms: dict[str, DraftRoom] = field(init=False, default_factory=dict)

    def select_drafting(self, requests: Iterable[Request]) -> list[Request]:
        """Return those that a draft can be made for, in one loop."""
        find, drafting = self._rooms.get, []
        for request in requests:
            if request.is_prefill_chunk:
                continue
            room = find(request.request_id)
            if room is None or room.params is not request.sampling_params:
                room = self.of(request)
            if not room.opted_out:
                drafting.append(request)
        return drafting

    def of(self, request: Request) -> DraftRoom:
        """Return the room of a request."""
        params = request.sampling_params
        room = self._rooms.get(request.request_id)
        if room is not None and room.params is params:
            return room
        opted_out = params is not None and opts_out(params.extra_args)
        most = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        # `limit` solved for the tokens that leave room for the deepest draft.
        num_tokens = min(most - 1, self.drafter_limit + 1) - self.max_depth
        if opted_out or (params is not None and params.min_tokens > 0):
            num_tokens = -1
        stop_token_ids = frozenset(find_stop_token_ids(params))
        room = DraftRoom(params, opted_out, num_tokens, stop_token_ids)
        self._rooms[request.request_id] = room
        return room

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended."""
        self._rooms.pop(req_id, None)

    def limit(self, request: Request, num_drafts: int) -> tuple[int, str]:
        """Return how many drafts can be of any use and why the others are not.

        Nothing after a stop token is ever emitted, whether the token is accepted (the
        end) or not.
        """
        num_usable, reason = self._limit_unseen(request, num_drafts)
        if reason == "length":
            stop_token_ids = self.of(request).stop_token_ids
            num_before_stop = _find_stop(request.spec_token_ids, stop_token_ids)
            if num_before_stop < num_usable:
                return num_before_stop, "stop_token"
        return num_usable, reason

    def can_draft(self, request: Request, position: int) -> bool:
        """Tell whether a draft at a position, 0 for the first, can be of use.

        Whatever its tokens are, so that this can be asked before they are drawn.
        """
        num_usable, _ = self._limit_unseen(request, position + 1)
        return num_usable > position and not request.is_prefill_chunk

    def may_anybody_draft(self, requests: Iterable[Request]) -> bool:
        """Tell whether any draft, in this step or later, can be of use to any."""
        find = self._rooms.get
        for request in requests:
            # Drafts come after the token of this step, which is not counted yet.
            num_new = 0 if request.is_prefill_chunk else 1
            room = find(request.request_id)
            if room is not None and request.num_tokens + num_new <= room.num_tokens:
                return True
            num_usable, reason = self._limit_unseen(request, 1, num_new)
            if num_usable > 0 or reason == "min_tokens":
                return True
        return False

    def _limit_unseen(
        self, request: Request, num_drafts: int, num_new: int = 0
    ) -> tuple[int, str]:
        """Return how many drafts can be of use, without a look at them, and why.

        After `num_new` tokens more than are counted.

        A request that may emit r more tokens gains at most r - 1 drafts and the bonus
        token. vLLM bars stop tokens from the bonus token of every block that *starts*
        short of `min_tokens`, so no block may reach past it.
        """
        room = self.of(request)
        if room.opted_out:
            return 0, "opt_out"
        num_short = 0
        if room.params is not None:
            num_short = room.params.min_tokens - request.num_output_tokens - num_new
        num_tokens = request.num_tokens + num_new
        num_left = min(
            request.max_tokens - request.num_output_tokens - num_new,
            self.max_model_len - num_tokens,
        )
        num_usable = min(num_drafts, num_left - 1, self.drafter_limit + 1 - num_tokens)
        if 0 < num_short <= num_usable:
            return num_short - 1, "min_tokens"
        return max(0, num_usable), "length"


def _find_stop(drafts: list[int], stops: frozenset[int | None]) -> int:
    """Return how many drafts there are up to the first that would end the request."""
    if stops.isdisjoint(drafts):
        return len(drafts)
    return 1 + next(i for i, token in enumerate(drafts) if token in stops)
