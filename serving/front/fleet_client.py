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
from serving.engine.compat import EngineCoreClient, FinishReason
from serving.front import failures
from serving.front.admission import OF_KEY, Admission
from serving.front.credit import Credit
from serving.front.failover import Failover
from serving.front.in_flight import InFlight, InFlightRequests
from serving.front.lease_holder import LeaseHolder, UnsendableError, lease_context
from serving.front.lease_queue import LeaseQueue
from serving.front.request_log import LEFT, log_end
from serving.front.routing import Routing
from serving.front.spare_leases import SpareLeases
from serving.front.token_links import TokenLinks
from serving.replica.leases import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from serving.front.in_flight import Lease
    from serving.front.lease_holder import OpenStream
    from serving.front.request_class import ClassShare
    from serving.front.token_link import TokenLink
    from serving.replica.kinship import Kin

logger = logging.getLogger("ray.serve")

MAX_WAIT_S: Final = 600.0
"""For a replica; then a request fails."""


class FleetClient(EngineCoreClient):
    """Leases replicas for requests, and receives their tokens.

    Attributes:
        on_refused: Told the id of a request that is not let in.
        credit: How much may be leased.
        routing: From whom.
        admission: What is let in.
        failover: What becomes of a request that has to move, or cannot.
    """

    # vLLM looks at these of its own clients.
    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

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
        self.on_refused: Callable[[str], None] = lambda _request_id: None
        self._supported_tasks = tuple(supported_tasks)
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._requests = InFlightRequests()
        self._links = TokenLinks(
            front, self._take_step, lambda _: self._queue.open_more(), self._lose_link
        )
        replies = ReplyLength()
        self.routing = Routing(self._links, running_ids, replies)
        self.credit = Credit(self.routing)
        self.admission = Admission(
            self._links, self.credit, self.routing, classes, max_requests, replies
        )
        self._leases = LeaseHolder(front, kin, open_stream, self._links)
        self._spares = SpareLeases(
            # Each request of another build's front is looked at by the engine.
            lambda link: self.routing.is_leaving(link) or link.offer.build != kin.build
        )
        self._queue: LeaseQueue[InFlight] = LeaseQueue(
            self._start_lease, self._may_lease
        )
        self.failover = Failover(
            self._requests, self._queue, self.credit, self.routing, self.admission
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
            self.failover.check(one)
            self.admission.admit(one, self._queue)
        except BaseException:
            self.on_refused(one.request_id)
            raise
        self._requests.add(one)
        self.failover.enqueue(one)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Forget requests, wherever they are."""
        for request_id in request_ids:
            one = self.failover.forget(request_id)
            if one is not None:
                log_end(one, LEFT)
                self.failover.give_up(one)
        self._queue.open_more()

    def shutdown(self, timeout: float | None = None) -> None:
        """Give everything up."""
        del timeout
        for one in self._requests:
            self.failover.forget(one.request_id)
            self.failover.give_up(one)
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
            self.failover.fail(one, failures.EXPIRED, HTTPStatus.TOO_MANY_REQUESTS)
        now_s = time.monotonic()
        for one in self._requests:
            if one.link is None and now_s - one.since_s > MAX_WAIT_S:
                self.failover.fail(
                    one,
                    "No engine replica took the request in time; retry.",
                    HTTPStatus.SERVICE_UNAVAILABLE,
                )
        self._queue.open_more()

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
            self.failover.fail(one, str(error), HTTPStatus.BAD_REQUEST)
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
            one.moves.num_refusals = 0
            one.place(link)
        # Whoever calls may be in the midst of the queue.
        asyncio.get_running_loop().call_soon(self._queue.settle)

    def _note_over(self, lease: Lease, reason: str | None) -> None:
        """Note that a lease has ended by itself, and why; None for a fault of ours."""
        one = lease.one
        if one is None or not lease.is_of(one) or one not in self._requests:
            return
        if reason is None:
            self.failover.fail(one, failures.FAULT, HTTPStatus.INTERNAL_SERVER_ERROR)
        else:
            if reason == BUSY:
                self.routing.note_busy(lease.refused_by)
            self.failover.move(one, reason)

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
            one.place(link)
            self.failover.note_begun(one)
            if output.finish_reason == FinishReason.ABORT:
                # Nobody here asked for it: the engine is being shut down.
                dropped.append(one)
                continue
            one.take(output, now_s, shift_s)
            if output.finish_reason is not None:
                ended.append(one)
                log_end(one, str(output.finish_reason), output.spec_decode_metrics)
                self.admission.note_whole(one)
                self.failover.forget(one.request_id)
                one.place(None)
            outputs.append(output)
        if ended:
            self._spares.end(link, ended)
        if outputs:
            step.outputs, step.timestamp = outputs, now_s
            step.scheduler_stats = None
            self._outputs.put_nowait(step)
        for one in dropped:
            self.failover.move(one, "engine is shut down")

    def _lose_link(self, link: TokenLink, reason: str) -> None:
        self._spares.lose(link)
        lost = [one for one in self._requests if one.is_at(link)]
        if lost:
            name = link.offer.replica
            logger.warning("Lost replica %s with %d: %s", name, len(lost), reason)
        for one in lost:
            self.failover.move(one, reason)
