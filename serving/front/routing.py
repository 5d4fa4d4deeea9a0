"""Which replica each lease is meant for, by what replicas said last."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from policies.decisions.prefix_holders import PrefixHolders
from policies.decisions.routing import (
    MAX_STATE_AGE_S,
    NUM_SAMPLED,
    Candidate,
    CommonShape,
    ReplicaLoad,
    choose_replica,
    fewer_of_two,
    warm_up,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from policies.estimators.reply_length import ReplyLength
    from serving.front.in_flight import InFlight
    from serving.front.token_link import TokenLink
    from serving.front.token_links import TokenLinks

LOOK_AGAIN_S: Final = 5.0
"""Until a replica that did not take a lease is tried again without being connected."""

BUSY_S: Final = 1.0
"""For which nothing is leased from a replica after it had no place: one request has, or
will have, its engine for itself."""


class Routing:
    """Chooses among the replicas a front is connected to, and finds new ones."""

    def __init__(
        self,
        links: TokenLinks,
        running_ids: Callable[[], Collection[str] | None],
        replies: ReplyLength,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know no replica yet.

        Args:
            links: To replicas.
            running_ids: Serve's names of those that run, connected or not; None while
                it has told none.
            replies: How long they are.
            draw: Returns a random number from 0 to below 1.
            clock: Seconds.
        """
        warm_up()
        # Told why a lease is meant for a replica: as `policies.decisions.routing` says,
        # or `new` (it runs, not connected yet); or why requests were merely counted:
        # `stale` (what replicas said last is too old), `full` (none has room); or why
        # Serve chooses: `alone`, `none` (nothing is connected that could take it).
        self.on_choice: Callable[[str], None] = lambda _reason: None
        self._links = links
        self._running_ids = running_ids
        self._draw = draw
        self._clock = clock
        self._prefixes = PrefixHolders()
        self._shape = CommonShape()
        self._replies = replies
        self._looked_s: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        self._coming: dict[InFlight, TokenLink] = {}
        self._unbegun: dict[InFlight, tuple[TokenLink, int]] = {}

    @property
    def staying(self) -> list[TokenLink]:
        """Links to replicas that may be leased: to all but those that drain."""
        return [link for link in self._links.all if not self.is_leaving(link)]

    @property
    def takers(self) -> list[TokenLink]:
        """Links to those that may be leased now."""
        return [link for link in self.staying if not self._is_busy(link)]

    def choose(self, one: InFlight) -> str:
        """Return Serve's name of the replica for a request, "" to let Serve choose."""
        if one.must_run_alone:
            # Its engine would be the one that the others want.
            self.on_choice("alone")
            return ""
        new = self.find_new()
        if new:
            now_s = self._clock()
            self._looked_s = {
                name: since_s
                for name, since_s in self._looked_s.items()
                if now_s - since_s < LOOK_AGAIN_S
            }
            self._looked_s[new] = now_s
            self.on_choice("new")
            return new
        token_ids = one.request.prompt_token_ids or ()
        links, num_tokens = self._links.all, one.num_tokens
        held = self._prefixes.find(token_ids)
        holder = self._links.find(held[0]) if held else None
        choice = choose_replica(
            len(links),
            lambda index: self._describe(
                links[index],
                num_tokens,
                held[1] if held and links[index] is holder else 0,
            ),
            self._draw,
            num_prompt_tokens=num_tokens,
            num_reply_tokens=self._replies.expect(one.standing.turn.flow),
            holder=None if holder is None else links.index(holder),
        )
        link, reason = (
            self._count() if choice is None else (links[choice.replica], choice.reason)
        )
        self.on_choice(reason)
        if link is None:
            return ""
        link.load.num_coming += 1
        self._coming[one] = link
        self._expect(one, link, token_ids)
        return link.offer.serve_id

    def find_new(self) -> str:
        """Return Serve's name of a replica to be looked for now, "" for none."""
        running = self._running_ids() or ()
        # By name: while old ones drain, as many may be connected as run.
        connected = {link.offer.serve_id for link in self._links.all}
        late_s = self._clock() - LOOK_AGAIN_S
        for name in running:
            if name not in connected and self._looked_s.get(name, late_s) <= late_s:
                return name
        return ""

    def find_chosen(self, one: InFlight) -> TokenLink | None:
        """Return where a request is on its way to, None if Serve chooses."""
        return self._coming.get(one)

    def note_busy(self, replica: str) -> None:
        """Note that a replica, by its own name, had no place for a lease."""
        now_s = self._clock()
        self._busy_s = {
            name: since_s
            for name, since_s in self._busy_s.items()
            if now_s - since_s < BUSY_S
        } | {replica: now_s}

    def note_settled(self, one: InFlight, link: TokenLink | None) -> None:
        """Note where a lease went in the end, None for nowhere."""
        wanted = self._coming.pop(one, None)
        if wanted is not None:
            wanted.load.num_coming -= 1
        # Its first token, even its last, may have come before the word of its place.
        if link is not wanted and one in self._unbegun:
            self.note_begun(one)
            if link is not None:
                self._expect(one, link, one.request.prompt_token_ids or ())

    def note_begun(self, one: InFlight) -> None:
        """Note that a request's prompt has been computed, or never will be."""
        expected = self._unbegun.pop(one, None)
        if expected is not None:
            link, num_tokens = expected
            link.load.num_prompt_tokens -= num_tokens

    def _expect(self, one: InFlight, link: TokenLink, token_ids: Sequence[int]) -> None:
        link.load.num_prompt_tokens += one.num_tokens
        self._unbegun[one] = link, one.num_tokens
        self._prefixes.note(token_ids, link.offer.replica)

    def _count(self) -> tuple[TokenLink | None, str]:
        """Choose where requests are fewest, and say why nothing better is known.

        What this front has in flight it knows without being told. Of others' requests
        only what was said of late counts.
        """
        links = self.takers
        if not links:
            return None, "none"
        heard = [link for link in links if not self._is_stale(link)]
        reason = "stale" if len(heard) < len(links) else "full"
        loads = [link.load for link in heard or links]
        counts = [
            load.num_requests if heard else load.num_held + load.num_coming
            for load in loads
        ]
        draws = [self._draw() for _ in range(NUM_SAMPLED)]
        place = fewer_of_two(np.array(counts), len(counts), np.array(draws))
        return (heard or links)[place], reason

    def _describe(
        self, link: TokenLink, num_tokens: int, num_cached: int
    ) -> Candidate | None:
        """Describe what a request would meet, None where it finds no room."""
        state, load = link.state, link.load
        has_room = load.num_requests == 0 or num_tokens <= state.num_free_kv_tokens
        has_seat = load.num_free_seats > load.num_coming
        if not (has_room and has_seat) or self.is_leaving(link):
            return None
        if self._is_stale(link) or self._is_busy(link):
            return None
        if state.costs_are_known:
            self._shape.learn(state.base_ms, state.request_ms)
        return Candidate(self.load_of(link), num_cached)

    def load_of(self, link: TokenLink) -> ReplicaLoad | None:
        """Return what a request would meet at a replica, None if that is unknown."""
        state = link.state
        if not state.costs_are_known or self._is_stale(link):
            return None
        base_ms, request_ms = self._shape.fit(
            state.base_ms, state.request_ms, state.num_running
        )
        return ReplicaLoad(
            base_ms=base_ms,
            request_ms=request_ms,
            prompt_token_ms=state.prompt_token_ms,
            tokens_per_step=state.tokens_per_step,
            num_requests=link.load.num_requests,
            num_prompt_tokens=link.load.num_prompt_tokens,
        )

    def is_leaving(self, link: TokenLink) -> bool:
        """Serve lists no replica that drains; its tokens come to the end."""
        running = self._running_ids()
        return running is not None and link.offer.serve_id not in running

    def _is_busy(self, link: TokenLink) -> bool:
        since_s = self._busy_s.get(link.offer.replica)
        return since_s is not None and self._clock() - since_s < BUSY_S

    def _is_stale(self, link: TokenLink) -> bool:
        return self._clock() - link.heard_s > MAX_STATE_AGE_S
