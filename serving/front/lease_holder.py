"""A front's side of leases: opens them, and holds them until they end."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

import msgspec

from serving.engine.compat import MsgpackEncoder
from serving.front.errors import lost_its_engine
from serving.replica.leases import ACCEPTED, OFFER
from serving.replica.token_channel import LinkOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from serving.front.in_flight import InFlight
    from serving.front.token_link import TokenLink
    from serving.front.token_links import TokenLinks

    OpenStream = Callable[[bytes, str, Sequence[bytes], bool], Any]


class LeaseHolder:
    """Sends requests to replicas and follows what becomes of their leases."""

    def __init__(
        self, front: bytes, fingerprint: str, open_stream: OpenStream, links: TokenLinks
    ) -> None:
        """Hold nothing yet.

        Args:
            front: The front's name, unique in the cluster.
            fingerprint: Of the engines that may be leased.
            open_stream: Opens a lease, as `EngineServer.lease`; what it returns can be
                iterated once and cancelled.
            links: Where tokens come from.
        """
        self._front = front
        self._fingerprint = fingerprint
        self._open_stream = open_stream
        self._links = links
        self._encoder = MsgpackEncoder()
        self._decode_offer = msgspec.msgpack.Decoder(LinkOffer).decode
        # Serve ties calls to the request in whose context they are made, and ends them
        # with it. A lease may be opened while another request's message is handled.
        self._context = contextvars.Context()

    def start(self, holding: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that holds a lease in no request's context."""
        loop = asyncio.get_running_loop()
        return loop.create_task(holding, context=self._context.copy())

    async def hold(
        self, one: InFlight, on_settled: Callable[[TokenLink | None], None]
    ) -> str:
        """Hold one lease from end to end.

        Args:
            one: Whose it is.
            on_settled: Told once of the link to the replica that has accepted it, or
                that it will get none.

        Returns:
            Why it ended.
        """
        one.was_alone = one.must_run_alone
        frames = [bytes(frame) for frame in self._encoder.encode(one.request_now())]
        is_placed, reason, stream = False, "lease ended", None
        try:
            stream = self._open_stream(
                self._front, self._fingerprint, frames, one.was_alone
            )
            async for kind, data in stream:
                if kind not in (OFFER, ACCEPTED):
                    reason = kind
                    continue
                link = self._links.open(self._decode_offer(data))
                if kind == ACCEPTED:
                    is_placed = True
                    on_settled(link)
        except asyncio.CancelledError:
            if stream is not None:
                stream.cancel()
            raise
        except Exception as error:
            reason = "engine died" if lost_its_engine(error) else repr(error)
        finally:
            if not is_placed:
                on_settled(None)
        return reason
