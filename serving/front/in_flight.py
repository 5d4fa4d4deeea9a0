"""One request as a front keeps it, so that any engine can go on with it."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import dataclasses
import functools
import hashlib
import math
import re
import time
from typing import TYPE_CHECKING, Any, Final

from policies.decisions.fairness import Turn
from serving.engine.shared.replay import EMITTED_TOKEN_IDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving.front.caller import Caller
    from serving.front.token_link import TokenLink

MAX_SHARED_DEATHS: Final = 2
"""Engines that may die of a request, or around it, before it must run alone."""

_SEED_BITS: Final = 63

_STREAMS: Final = "output_kind"
"""Of a request's parameters, how its client wants to be told of tokens."""

_CHOICE: Final = re.compile(r"\d+_(.+)", re.DOTALL)
"""As vLLM's `ParentRequest` names each answer of a request for several."""

_PROMPT: Final = re.compile(r"(cmpl-.+)-\d+", re.DOTALL)
"""As vLLM names each prompt of a completion, before it adds random digits."""


@dataclasses.dataclass(eq=False)
class Lease:
    """A place in a replica: one streaming call, for one request after another.

    Attributes:
        one: Whose it is, None while it is spare.
        request_id: Of the request in the engine that it has, or had last.
        offered: The link to the replica that has answered, and may still refuse.
        link: To the replica, once that has accepted the first request.
        refused_by: The replica that was busy, if one was.
        call: Follows the call until it ends.
        opened_s: When, monotonic.
    """

    one: InFlight | None
    request_id: str
    offered: TokenLink | None = None
    link: TokenLink | None = None
    refused_by: str = ""
    call: asyncio.Task[None] | None = None
    opened_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether its call has ended."""
        return self.call is not None and self.call.done()

    def is_of(self, one: InFlight) -> bool:
        """Return whether it is this request's, in its present attempt."""
        return one.lease is self and self.request_id == one.engine_id

    def misses_none(self, link: TokenLink) -> bool:
        """Return whether all tokens of its request come over a link.

        Until a replica hears that a link is new, it sends over the one before, into the
        void, also what it begins only then.
        """
        return self.link is link or self.opened_s > link.clean_s

    def hand_to(self, one: InFlight) -> None:
        """Make it another request's."""
        self.one, self.request_id = one, one.engine_id
        one.lease = self

    def cancel(self) -> None:
        """End the call, unless it is what asks for that."""
        if self.call is not None and self.call is not asyncio.current_task():
            self.call.cancel()


@dataclasses.dataclass(slots=True)
class Standing:
    """What the front's admission made of a request.

    Attributes:
        turn: What it takes of the replicas, and from whose share.
        caller: Whose it is; None where keys are off.
        due_s: When its last token is wanted, monotonic.
        hurries: Whether its flow has less than its share of the seats.
        has_seat: Whether it counts among the seats that its flow holds.
    """

    turn: Turn = Turn("", 0.0)  # noqa: RUF009 - immutable
    caller: Caller | None = None
    due_s: float = math.inf
    hurries: bool = False
    has_seat: bool = False


@dataclasses.dataclass(slots=True)
class Moves:
    """How often a request had to look for another replica.

    Attributes:
        attempt: Number of leases given up before this one.
        num_deaths: Engines that died while they had it.
        num_refusals: Replicas in a row that did not take it.
        num_replays: Times that it has moved.
    """

    attempt: int = 0
    num_deaths: int = 0
    num_refusals: int = 0
    num_replays: int = 0


@dataclasses.dataclass(eq=False)
class InFlight:
    """A request from when the front took it until its last token.

    Attributes:
        request: vLLM's `EngineCoreRequest`, as the front made it.
        emitted: Token ids that came out so far.
        standing: What admission made of it.
        moves: How often it had to look for another replica.
        was_alone: Whether the present lease has its engine for itself.
        has_prompt_logprobs: Whether those have come.
        link: Where its tokens come from, once placed.
        lease: Its place in a replica, or what looks for one.
        taken_s: When the front took it, monotonic.
        first_s: When its first token came, likewise; None before.
        since_s: When it began to wait for a replica, monotonic.
        context: In which its leases are opened.
    """

    request: Any
    emitted: list[int] = dataclasses.field(default_factory=list)
    standing: Standing = dataclasses.field(default_factory=Standing)
    moves: Moves = dataclasses.field(default_factory=Moves)
    was_alone: bool = False
    has_prompt_logprobs: bool = False
    link: TokenLink | None = None
    lease: Lease | None = None
    taken_s: float = 0.0
    first_s: float | None = None
    since_s: float = 0.0
    context: contextvars.Context = dataclasses.field(
        default_factory=contextvars.Context
    )

    @property
    def request_id(self) -> str:
        """The request's id in the front."""
        return str(self.request.request_id)

    @functools.cached_property
    def asked_together(self) -> str | None:
        """What the answers to one request share; None where it has only one."""
        match = _PROMPT.fullmatch(self.request.external_req_id or "")
        match = match or _CHOICE.fullmatch(self.request_id)
        return match and match[1]

    @property
    def engine_id(self) -> str:
        """Its id in an engine: another one with every attempt.

        So whatever still comes from an attempt that was given up names no request.
        """
        attempt = self.moves.attempt
        return f"{self.request_id}~{attempt}" if attempt else self.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine computes before it goes on."""
        return len(self.request.prompt_token_ids or ()) + len(self.emitted)

    @property
    def must_run_alone(self) -> bool:
        """Whether its neighbours would be at risk."""
        return self.moves.num_deaths >= MAX_SHARED_DEATHS

    def place(self, link: TokenLink | None) -> None:
        """Note which replica has it, None for none."""
        if self.link is not link:
            if self.link is not None:
                self.link.load.num_held -= 1
            if link is not None:
                link.load.num_held += 1
            self.link = link

    def take(self, output: Any, now_s: float, shift_s: float) -> None:
        """Keep what another engine needs to go on, and make an output the front's.

        Args:
            output: Of one step of an engine, whose times are by its own clock.
            now_s: When it came, monotonic.
            shift_s: From the engine's clock to the front's.
        """
        if output.new_token_ids and self.first_s is None:
            self.first_s = now_s
        if self.emitted and output.events:
            # Of a replay: from when it was queued elsewhere vLLM would count back to
            # when it first ran.
            events = [one for one in output.events if one.type.name == "PREEMPTED"]
            output.events = events or None
        self.emitted.extend(output.new_token_ids)
        if output.new_prompt_logprobs_tensors is not None:
            self.has_prompt_logprobs = True
        for event in output.events or ():
            event.timestamp += shift_s
        output.request_id = self.request_id

    def is_at(self, link: TokenLink) -> bool:
        """Return whether a replica has it, or is about to take it."""
        if self.link is None and self.lease is not None:
            return self.lease.offered is link
        return self.link is link

    def request_now(self) -> Any:
        """Return the request as the next engine is to get it."""
        if not self.moves.attempt:
            return self.request
        request = copy.copy(self.request)
        request.request_id = self.engine_id
        params = self.request.sampling_params
        if params is not None and self.emitted:
            params = copy.copy(params)
            params.extra_args = {
                **(params.extra_args or {}),
                EMITTED_TOKEN_IDS: list(self.emitted),
            }
            if params.seed is not None:
                params.seed = derive_seed(params.seed, len(self.emitted))
            if self.has_prompt_logprobs:
                params.prompt_logprobs = None
            request.sampling_params = params
        return request

    def digest(self) -> bytes:
        """Return what is equal for requests that an engine cannot tell apart."""
        request, params = self.request, self.request.sampling_params
        # All fields: what vLLM shows of them is not all.
        names = () if params is None else params.__struct_fields__
        parts = (
            request.prompt_token_ids,
            [one.identifier for one in request.mm_features or ()],
            # Nobody compares embeddings, so these are like themselves alone.
            request.prompt_embeds is not None and request.request_id,
            [_as_text(getattr(params, name)) for name in names if name != _STREAMS],
        )
        return hashlib.sha256(repr(parts).encode()).digest()


def _as_text(value: Any) -> str:
    return repr(sorted(value) if isinstance(value, set | frozenset) else value)


class InFlightRequests:
    """Those of a front, by their id in the front and by that in an engine."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._by_engine_id: dict[str, InFlight] = {}
        self._engine_ids: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_engine_id)

    def __contains__(self, one: InFlight) -> bool:
        """Return whether this request is one, in its present attempt."""
        return self.find(one.engine_id) is one

    def __iter__(self) -> Iterator[InFlight]:
        """Iterate over those there are now."""
        return iter(list(self._by_engine_id.values()))

    def add(self, one: InFlight) -> None:
        """Keep a request in its present attempt."""
        self._by_engine_id[one.engine_id] = one
        self._engine_ids[one.request_id] = one.engine_id

    def find(self, engine_id: str) -> InFlight | None:
        """Return the request with this id in an engine, None if it is none's now."""
        return self._by_engine_id.get(engine_id)

    def pop(self, request_id: str) -> InFlight | None:
        """Forget and return the request with this id in the front."""
        engine_id = self._engine_ids.pop(request_id, None)
        return None if engine_id is None else self._by_engine_id.pop(engine_id, None)


def derive_seed(seed: int, num_emitted: int) -> int:
    """Return a seed whose noise was not used before the cut.

    An engine starts a request's noise at the seed. The same seed again would give the
    tokens behind the cut the noise that the first tokens had.

    Args:
        seed: The client's.
        num_emitted: Tokens before the cut.
    """
    text = f"{seed} {num_emitted}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> (64 - _SEED_BITS)
