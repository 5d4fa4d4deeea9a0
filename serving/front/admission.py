"""Which requests a front takes, and from whose share of the replicas' time.

The policy is `policies.decisions.fairness`; here it learns what requests are like and
what replicas say.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from policies.decisions.deadlines import predict_finish
from policies.decisions.fairness import Turn, request_cost_ms
from policies.decisions.places import Places
from policies.decisions.routing import ReplicaLoad
from serving.engine.compat import GracefulHTTPError
from serving.front.caller import caller
from serving.front.refusal import note_retry_after
from serving.front.request_class import DEADLINE_XARG, DEFAULT_CLASS, find_class
from serving.front.request_limits import check_sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from policies.estimators.reply_length import ReplyLength
    from serving.front.credit import Credit
    from serving.front.in_flight import InFlight
    from serving.front.lease_queue import LeaseQueue
    from serving.front.request_class import ClassShare
    from serving.front.routing import Routing
    from serving.front.token_links import TokenLinks

LOOK_AGAIN_S: Final = 0.25
"""How old the mean of what replicas said may be; they speak four times a second."""

OF_KEY: Final = "\0"
"""Between the class and the key in the name of a flow."""

_UNKNOWN: Final = ReplicaLoad(
    base_ms=1.0,
    request_ms=0.0,
    prompt_token_ms=0.0,
    tokens_per_step=1.0,
    num_requests=1,
)
"""Until a replica has said what its steps cost, requests differ by their tokens."""


class Admission:
    """Refuses what finds no place, or would come too late.

    Attributes:
        on_refusal: Told why a request was refused: `queue_full`, `flow_full` (others
            may still come), `deadline` (it would not be met), `expired` (it passed
            while the request waited).
    """

    def __init__(
        self,
        links: TokenLinks,
        credit: Credit,
        routing: Routing,
        classes: Mapping[str, ClassShare],
        max_requests: Callable[[int], int],
        replies: ReplyLength,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have taken nothing yet.

        Args:
            links: To replicas.
            credit: Knows what seats there are.
            routing: Knows what a request would meet there.
            classes: By name.
            max_requests: Requests that all fronts together may have, by the replicas
                connected.
            replies: How long they are.
            clock: Seconds, as requests have it.
        """
        self.on_refusal: Callable[[str], None] = lambda _reason: None
        self._links = links
        self._credit = credit
        self._routing = routing
        self._classes = classes
        self._max_requests = max_requests
        self._clock = clock
        self._places = Places(len(classes.keys() | {DEFAULT_CLASS}))
        self._replies = replies
        self._now: ReplicaLoad | None = None
        self._full = _UNKNOWN
        self._looked_s = -math.inf

    def admit(self, one: InFlight, queue: LeaseQueue[InFlight]) -> None:
        """Take a request in, and note what it takes and when it is due.

        Raises:
            GracefulHTTPError: It finds no place (503), is predicted to miss its
                deadline (429), or is more than an engine can hold (400).
        """
        request, standing = one.request, one.standing
        params = request.sampling_params
        if params is not None:
            check_sampling(params)
        extra = (params.extra_args if params is not None else None) or {}
        class_name = find_class(extra, request.priority, self._classes)
        share = self._classes.get(class_name)
        flow = class_name
        standing.caller = caller.get()
        if standing.caller is not None:
            standing.caller.note_fronts(self.num_fronts)
            # Keys share alike, each with its class's weight.
            flow = f"{class_name}{OF_KEY}{standing.caller.name}"
        self._places.note_flow(flow, self._clock())
        self._look()
        standing.turn = Turn(
            flow,
            request_cost_ms(
                self._full,
                one.num_tokens,
                self._expect_reply(one, flow),
            ),
            share.weight if share else 1.0,
            request.priority,
        )
        self._check_places(flow)
        has_share_left = self._credit.has_share_left(standing.turn)
        standing.hurries = has_share_left and not queue.is_behind(standing.turn)
        deadline_ms = extra.get(DEADLINE_XARG) or (share.deadline_ms if share else None)
        if deadline_ms is not None:
            standing.due_s = one.since_s + 1e-3 * deadline_ms
            if self._now is not None:
                self._check_deadline(one, self._now, deadline_ms, queue)
        self._places.take(flow)
        if standing.hurries:
            self._credit.take_seat(one)

    def note_whole(self, one: InFlight) -> None:
        """Learn from a reply that has come to its end."""
        self._replies.note(one.standing.turn.flow, len(one.emitted))

    def note_gone(self, one: InFlight, others: Iterable[InFlight]) -> None:
        """Note that a request that was admitted is there no more, among others."""
        standing = one.standing
        self._places.free(standing.turn.flow)
        if standing.caller is not None:
            standing.caller.charge(one.num_tokens)
        if one.emitted and standing.due_s < math.inf and one.asked_together is not None:
            # Of its answers this one has come, so that the others have time.
            for other in others:
                if other.asked_together == one.asked_together:
                    other.standing.due_s = math.inf

    def expire(self, requests: Iterable[InFlight]) -> list[InFlight]:
        """Return those that are past their deadline before they have begun.

        A request for several answers has begun with the first of them.
        """
        waiting, begun = [], set()
        for one in requests:
            if one.link is not None or one.lease is not None or one.emitted:
                begun.add(one.asked_together)
            elif self._clock() > one.standing.due_s:
                waiting.append(one)
        begun.discard(None)
        expired = [one for one in waiting if one.asked_together not in begun]
        for _ in expired:
            self.on_refusal("expired")
        return expired

    @property
    def num_fronts(self) -> int:
        """Fronts that share the replicas, this one included."""
        return max((link.state.num_fronts for link in self._links), default=1)

    def _check_places(self, flow: str) -> None:
        # Clients spread over fronts; together these admit what the settings say.
        limit = max(1, self._max_requests(len(self._links)) // self.num_fronts)
        if self._places.has_room(flow, limit):
            return
        is_full = self._places.num_taken >= limit
        self.on_refusal("queue_full" if is_full else "flow_full")
        raise GracefulHTTPError(
            "All replicas are busy and the queue is full; retry."
            if is_full
            else "All replicas are busy and the queue is full for this class; retry.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )

    def _check_deadline(
        self,
        one: InFlight,
        now: ReplicaLoad,
        deadline_ms: float,
        queue: LeaseQueue[InFlight],
    ) -> None:
        num_coming = sum(link.load.num_coming for link in self._links)
        turn, hurries = one.standing.turn, one.standing.hurries
        num_before = 0 if hurries else len(queue)
        has_seat = self._credit.count_free(one) - num_coming > num_before
        # The last one may be gone since what it said was looked at.
        num_replicas = max(1, len(self._routing.staying))
        predicted = predict_finish(
            now if has_seat else self._full,
            num_replicas / self.num_fronts,
            0.0 if hurries else queue.work_ahead_ms(turn),
            one.num_tokens,
            self._expect_reply(one, turn.flow),
            has_seat=has_seat,
        )
        late_ms = predicted.late_ms(deadline_ms)
        if not late_ms:
            return
        note_retry_after(1e-3 * late_ms)
        self.on_refusal("deadline")
        raise GracefulHTTPError(
            f"The answer would wait for about {math.ceil(predicted.wait_ms)} and "
            f"take {math.ceil(predicted.run_ms)} ms, too much to be sure of its "
            f"deadline_ms of {deadline_ms:g}; retry later, or allow it more.",
            HTTPStatus.TOO_MANY_REQUESTS,
        )

    def _expect_reply(self, one: InFlight, flow: str) -> float:
        usual = self._replies.expect(flow)
        params = one.request.sampling_params
        limit = params.max_tokens if params is not None else None
        return usual if limit is None else min(usual, max(1, limit))

    def _look(self) -> None:
        """Learn the mean load of a replica, as it is and with all its seats taken."""
        now_s = self._clock()
        if self._now is not None and now_s - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        # Costs of one that drains are better than none.
        links = self._routing.staying or self._links.all
        loads = [load for link in links if (load := self._routing.load_of(link))]
        self._now, self._full = None, _UNKNOWN
        if loads:
            self._now = _mean(loads)
            num_seats = sum(link.offer.num_seats for link in links)
            mean_seats = max(1, round(num_seats / len(links)))
            self._full = replace(self._now, num_requests=mean_seats)


def _mean(loads: list[ReplicaLoad]) -> ReplicaLoad:
    count = len(loads)
    return ReplicaLoad(
        base_ms=sum(one.base_ms for one in loads) / count,
        request_ms=sum(one.request_ms for one in loads) / count,
        prompt_token_ms=sum(one.prompt_token_ms for one in loads) / count,
        tokens_per_step=sum(one.tokens_per_step for one in loads) / count,
        num_requests=round(sum(one.num_requests for one in loads) / count),
        num_prompt_tokens=round(sum(one.num_prompt_tokens for one in loads) / count),
    )
