"""The engine core as `AsyncLLM` sees it: in truth, all replicas of a deployment.

Everything a client sees (text, stop strings, log probabilities, tool calls, usage) is
made above this, from token ids, and outlives any engine. Below it a request is a lease
from one replica; when that ends before the request does, another replica goes on with
the token ids that came out so far.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from http import HTTPStatus
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from policies.estimators.reply_length import ReplyLength
from serving.engine.compat import (
    EngineCoreClient,
    FinishReason,
    GracefulHTTPError,
)
from serving.front import failures
from serving.front.admission import OF_KEY, Admission
from serving.front.condemned import CONDEMNED, Condemned
from serving.front.credit import Credit
from serving.front.in_flight import InFlight, InFlightRequests
from serving.front.lease_holder import LeaseHolder, UnsendableError, lease_context
from serving.front.lease_queue import LeaseQueue
from serving.front.request_log import LEFT, log_end
from serving.front.routing import Routing
from serving.front.spare_leases import SpareLeases
from serving.front.token_links import TokenLinks
from serving.replica.leases import BUSY, OTHER_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from serving.front.in_flight import Lease
    from serving.front.lease_holder import OpenStream
    from serving.front.request_class import ClassShare
    from serving.front.token_link import TokenLink
    from serving.replica.kinship import Kin

logger = logging.getLogger("ray.serve")

FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 1.0

MAX_STRANGERS: Final = 12
"""Engines in a row that cannot go on with a request, where no other is known: in nine
seconds or so each that runs was asked."""

MAX_WAIT_S: Final = 600.0
"""For a replica; then a request fails."""

MAX_REPLAYS: Final = 20
"""Of one request. A fault of ours that its tokens trigger must not go on for ever."""


class FleetClient(EngineCoreClient):
    """Leases replicas for requests, and receives their tokens.

    Attributes:
        on_replay: Told why, and of how many tokens, when a request moves.
        on_failure: Told the id of a request that cannot be served, and why.
        on_refused: Told the id of a request that is not let in.
        credit: How much may be leased.
        routing: From whom.
        admission: What is let in.
    """

    def __init__(
        self,
        *,
        front: bytes,
        kin: Kin,
        supported_tasks: Sequence[str],
        open_stream: OpenStream,
        max_requests: Callable[[int], int] = lambda _replicas: sys.maxsize,
        classes: Mapping[str, ClassShare] = MappingProxyType({}),
        running_ids: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            front: The front's name, unique in the cluster.
            kin: Its own.
            supported_tasks: Of those engines.
            open_stream: Opens a lease, as `EngineServer.lease`; what it returns can be
                iterated once and cancelled.
            max_requests: Requests that all fronts together may have, by the replicas
                connected.
            classes: How classes of requests are treated, by name.
            running_ids: Serve's names of the replicas that run, connected or not.
        """
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.on_replay: Callable[[str, int], None] = lambda _reason, _tokens: None
        self.on_failure: Callable[[str, Exception], None] = failures.log_unheard
        self.on_refused: Callable[[str], None] = lambda _request_id: None
        self._supported_tasks = tuple(supported_tasks)
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._requests = InFlightRequests()
        self._condemned = Condemned()
        self._links = TokenLinks(
            front, self._take_step, lambda _: self._queue.open_more(), self._lose_link
        )
        self._replies = ReplyLength()
        self.routing = Routing(self._links, running_ids, self._replies)
        self.credit = Credit(self.routing)
        self.admission = Admission(
            self._links, self.credit, self.routing, classes, max_requests, self._replies
        )
        self._leases = LeaseHolder(front, kin, open_stream, self._links)
        self._spares = SpareLeases(
            # Each request of another build's front is looked at by the engine.
            lambda link: self.routing.is_leaving(link) or link.offer.build != kin.build
        )
        self._queue: LeaseQueue[InFlight] = LeaseQueue(
            self._start_lease, self._may_lease
        )

    @property
    def num_unplaced(self) -> int:
        """Requests that wait for a replica."""
        return sum(one.link is None for one in self._requests)

    @property
    def num_links(self) -> int:
        """Replicas connected."""
        return len(self._links)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the tasks of the deployment's engines."""
        return self._supported_tasks

    async def get_output_async(self) -> Any:
        """Wait for the next step of any engine; its requests are ours alone."""
        return await self._outputs.get()

    async def add_request_async(self, request: Any) -> None:
        """Let a request wait for a replica.

        Raises:
            GracefulHTTPError: Too many wait, it would come too late, or it killed its
                engine lately.
        """
        now_s = time.monotonic()
        one = InFlight(request, taken_s=now_s, since_s=now_s, context=lease_context())
        try:
            if self._condemned.holds(one):
                raise GracefulHTTPError(CONDEMNED, HTTPStatus.BAD_REQUEST)
            self.admission.admit(one, self._queue)
        except BaseException:
            self.on_refused(one.request_id)
            raise
        self._requests.add(one)
        self._enqueue(one)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Forget requests, wherever they are."""
        for request_id in request_ids:
            one = self._forget(request_id)
            if one is not None:
                log_end(one, LEFT)
                self._give_up(one)
        self._queue.open_more()

    def shutdown(self, timeout: float | None = None) -> None:
        """Give everything up."""
        del timeout
        for one in self._requests:
            self._forget(one.request_id)
            self._give_up(one)
        self._links.close()

    def count_waiting(self) -> dict[str, int]:
        """Count what waits in the queue by class."""
        counts: Counter[str] = Counter()
        for flow, count in self._queue.count().items():
            counts[flow.partition(OF_KEY)[0]] += count
        return dict(counts)

    def tell_waiting(self) -> None:
        """Tell replicas what waits for them; call it now and then."""
        num_waiting = sum(one.lease is None for one in self._requests)
        # Of what drains Serve asks nothing more: told there, it would be forgotten.
        self._links.tell_waiting(num_waiting, self.routing.staying)

    def fail_overdue(self) -> None:
        """End what has waited too long, request or lease; call it now and then."""
        self._spares.end_old()
        for one in self.admission.expire(self._requests):
            self._fail(one, failures.EXPIRED, HTTPStatus.TOO_MANY_REQUESTS)
        now_s = time.monotonic()
        for one in self._requests:
            if one.link is None and now_s - one.since_s > MAX_WAIT_S:
                self._fail(
                    one,
                    "No engine replica took the request in time; retry.",
                    HTTPStatus.SERVICE_UNAVAILABLE,
                )
        self._queue.open_more()

    def _enqueue(self, one: InFlight) -> None:
        # It may have been given up while it waited to look on.
        if one in self._requests:
            first = one.num_replays > 0 or one.hurries
            self._queue.add(one, one.turn, first=first)

    def _forget(self, request_id: str) -> InFlight | None:
        one = self._requests.pop(request_id)
        if one is not None:
            self.credit.note_left(one)
            self.admission.note_gone(one, self._requests)
        return one

    def _may_lease(self, one: InFlight, num_unsettled: int) -> bool:
        is_here = one in self._requests
        return not is_here or self.credit.allows(one, num_unsettled)

    def _start_lease(self, one: InFlight) -> None:
        if one not in self._requests:
            asyncio.get_running_loop().call_soon(self._queue.settle)
            return
        try:
            frames = self._leases.encode(one)
        except UnsendableError as error:
            logger.warning("%s cannot be sent: %r", one.engine_id, error.__cause__)
            asyncio.get_running_loop().call_soon(self._queue.settle)
            self._fail(one, str(error), HTTPStatus.BAD_REQUEST)
            return
        self.credit.note_opened(one)
        one.was_alone = one.must_run_alone
        wanted = self.routing.choose(one)
        link = self.routing.find_chosen(one)
        spare = self._spares.take(link) if link is not None else None
        if link is None or spare is None:
            one.lease = self._leases.open(
                one, frames, wanted, self._note_settled, self._note_over
            )
            return
        link.go_on(spare.request_id, frames)
        spare.hand_to(one)
        self._note_settled(one, spare, link)

    def _note_settled(
        self, one: InFlight, lease: Lease, link: TokenLink | None
    ) -> None:
        """Note which replica has a request by a lease, None for none."""
        self.routing.note_settled(one, link)
        if link is not None and lease.is_of(one) and one in self._requests:
            one.num_refusals = 0
            self._place(one, link)
        # Whoever calls may be in the midst of the queue.
        asyncio.get_running_loop().call_soon(self._queue.settle)

    def _note_over(self, lease: Lease, reason: str | None) -> None:
        """Note that a lease has ended by itself, and why; None for a fault of ours."""
        one = lease.one
        if one is None or not lease.is_of(one) or one not in self._requests:
            return
        if reason is None:
            self._fail(one, failures.FAULT, HTTPStatus.INTERNAL_SERVER_ERROR)
        else:
            if reason == BUSY:
                self.routing.note_busy(lease.refused_by)
            self._move(one, reason)

    def _place(self, one: InFlight, link: TokenLink | None) -> None:
        """Note which replica has a request, None for none."""
        if one.link is not link:
            if one.link is not None:
                one.link.num_held -= 1
            if link is not None:
                link.num_held += 1
            one.link = link

    def _take_step(self, link: TokenLink, step: Any) -> None:
        """Hand on one step of one engine."""
        now_s = time.monotonic()
        # Another host's monotonic clock started at another time.
        shift_s = now_s - step.timestamp
        outputs, ended, dropped = [], [], []
        for output in step.outputs:
            one = self._requests.find(output.request_id)
            if one is None or one.lease is None or not one.lease.misses_none(link):
                continue
            self._place(one, link)
            self._note_begun(one)
            if output.finish_reason == FinishReason.ABORT:
                # Nobody here asked for it: the engine is being shut down.
                dropped.append(one)
                continue
            if output.new_token_ids and one.first_s is None:
                one.first_s = now_s
            one.emitted.extend(output.new_token_ids)
            if output.new_prompt_logprobs_tensors is not None:
                one.has_prompt_logprobs = True
            for event in output.events or ():
                event.timestamp += shift_s
            if output.finish_reason is not None:
                ended.append(one)
                log_end(one, str(output.finish_reason), output.spec_decode_metrics)
                self._replies.note(one.turn.flow, len(one.emitted))
                self._forget(one.request_id)
                self._place(one, None)
            output.request_id = one.request_id
            outputs.append(output)
        if ended:
            self._spares.end(link, ended)
        if outputs:
            step.outputs, step.timestamp = outputs, now_s
            step.scheduler_stats = None
            self._outputs.put_nowait(step)
        for one in dropped:
            self._move(one, "engine is shut down")

    def _lose_link(self, link: TokenLink, reason: str) -> None:
        self._spares.lose(link)
        lost = [one for one in self._requests if one.is_at(link)]
        if lost:
            name = link.offer.replica
            logger.warning("Lost replica %s with %d: %s", name, len(lost), reason)
        for one in lost:
            self._move(one, reason)

    def _move(self, one: InFlight, reason: str) -> None:
        """Let another engine go on with a request."""
        # One that is busy has not taken what it was handed.
        was_placed, was_alone = one.link is not None and reason != BUSY, one.was_alone
        # Where the drain of a replica took too long, Serve ends it: no request did.
        is_leaving = one.link is not None and self.routing.is_leaving(one.link)
        self._requests.pop(one.request_id)
        self.credit.note_left(one)
        self._give_up(one)
        # One that was dead before it took the request did not die of it.
        if was_placed and failures.is_death(reason, is_leaving=is_leaving):
            one.num_deaths += 1
            if was_alone:
                self._condemn(one)
                return
        one.attempt += 1
        one.lease = None
        self._requests.add(one)
        if was_placed:
            one.num_replays += 1
            if one.num_replays > MAX_REPLAYS:
                self._fail(one, failures.INTERRUPTED, HTTPStatus.SERVICE_UNAVAILABLE)
                return
            shown = reason if reason in failures.REASONS else "failure"
            self.on_replay(shown, one.num_tokens)
            one.since_s = time.monotonic()
            self._enqueue(one)
            return
        if (
            reason == OTHER_MODEL
            and one.num_refusals >= MAX_STRANGERS
            and not self.routing.staying
        ):
            self._fail(one, failures.REPLACED, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        logger.info("Request %s goes on looking: %s", one.request_id, reason)
        wait_s = min(FIRST_RETRY_S * 2**one.num_refusals, LAST_RETRY_S)
        one.num_refusals += 1
        asyncio.get_running_loop().call_later(wait_s, self._enqueue, one)

    def _give_up(self, one: InFlight) -> None:
        """End whatever a request holds at a replica, or its wait for one."""
        self._queue.remove(one)
        if one.link is not None and not one.link.is_lost:
            one.link.abort([one.engine_id])
        elif one.lease is not None:
            one.lease.cancel()
        self._place(one, None)
        self._note_begun(one)

    def _note_begun(self, one: InFlight) -> None:
        self.credit.note_begun(one)
        self.routing.note_begun(one)

    def _condemn(self, one: InFlight) -> None:
        logger.error("Request %s killed an engine alone", one.request_id)
        self._condemned.add(one)
        # It is among the requests no more.
        self.admission.note_gone(one, self._requests)
        self._fail(one, CONDEMNED, HTTPStatus.BAD_REQUEST)

    def _fail(self, one: InFlight, message: str, status: HTTPStatus) -> None:
        log_end(one, f"error {status.value}")
        if self._forget(one.request_id) is not None:
            self._give_up(one)
        self.on_failure(one.request_id, GracefulHTTPError(message, status))
