"""A front's side of leases: opens them, and holds them until they end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from ray.exceptions import RayActorError, RayTaskError
from vllm.v1.engine.exceptions import EngineDeadError

from serving.compat_ray import _RequestContext, _serve_request_context
from serving.engine.compat import MsgpackEncoder
from serving.front.failures import DIED
from serving.front.in_flight import Lease
from serving.replica.leases import ACCEPTED, OFFER
from serving.replica.seats import LeaseLostError
from serving.replica.token_channel import LinkOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.front.in_flight import InFlight
    from serving.front.token_link import TokenLink
    from serving.front.token_links import TokenLinks
    from serving.replica.kinship import Kin

    OnSettled = Callable[["InFlight", "Lease", TokenLink | None], None]
    OnOver = Callable[["Lease", str | None], None]

    class OpenStream(Protocol):
        """Opens a lease, as `EngineServer.lease`."""

        def __call__(
            self,
            front: bytes,
            kin: Kin,
            frames: Sequence[bytes],
            alone: bool,
            /,
            *,
            wanted: str,
        ) -> Any:
            """Return what can be iterated once, and cancelled."""


logger = logging.getLogger("ray.serve")

PATIENCE_S: Final = 10.0
"""For the first word of a replica that was chosen: it comes at once, or never, as when
its host has vanished, which Ray finds out much later."""


_EARLIER_LINK: Final = "it may have begun over an earlier link"


class UnsendableError(Exception):
    """A request holds what the way to engines has no form for."""


class LeaseHolder:
    """Opens leases and follows what becomes of them."""

    def __init__(
        self, front: bytes, kin: Kin, open_stream: OpenStream, links: TokenLinks
    ) -> None:
        """Hold nothing yet.

        Args:
            front: The front's name, unique in the cluster.
            kin: Its own.
            open_stream: Opens a lease, as `EngineServer.lease`; what it returns can be
                iterated once and cancelled.
            links: Where tokens come from.
        """
        self._front = front
        self._kin = kin
        self._open_stream = open_stream
        self._links = links
        self._encoder = MsgpackEncoder()
        self._decode_offer = msgspec.msgpack.Decoder(LinkOffer).decode

    def encode(self, one: InFlight) -> list[bytes]:
        """Return a request's frames, as for the engine core.

        Raises:
            UnsendableError: No replica can be sent the request.
        """
        try:
            return [bytes(frame) for frame in self._encoder.encode(one.request_now())]
        except Exception as error:
            raise UnsendableError(_UNSENDABLE) from error

    def open(
        self,
        one: InFlight,
        frames: Sequence[bytes],
        wanted: str,
        on_settled: OnSettled,
        on_over: OnOver,
    ) -> Lease:
        """Begin to look for a place for a request.

        Args:
            one: Whose it is at first.
            frames: It, encoded.
            wanted: Serve's name of the replica it is meant for, "" for any.
            on_settled: Told once of the link to the replica that has accepted it, or
                that it will get none.
            on_over: Told why it has ended by itself, None for a fault of ours.
        """
        lease = Lease(one, one.engine_id)
        is_settled = False

        def settle(link: TokenLink | None) -> None:
            nonlocal is_settled
            if not is_settled:
                is_settled = True
                on_settled(one, lease, link)

        async def follow() -> None:
            try:
                reason = await self._hold(lease, one, frames, wanted, settle)
            except Exception:
                logger.exception("The lease of request %s failed", one.request_id)
                on_over(lease, None)
            else:
                on_over(lease, reason)

        # Not in the context of whoever calls, who may handle another's message.
        lease.call = asyncio.get_running_loop().create_task(
            follow(), context=one.context.copy()
        )
        # One that is cancelled before its first step never runs, and says nothing.
        lease.call.add_done_callback(lambda _: settle(None))
        return lease

    async def _hold(
        self,
        lease: Lease,
        one: InFlight,
        frames: Sequence[bytes],
        wanted: str,
        settle: Callable[[TokenLink | None], None],
    ) -> str:
        """Hold a lease from end to end; return why it ended."""
        is_placed, reason, stream = False, "lease ended", None
        try:
            stream = self._open_stream(
                self._front,
                self._kin,
                frames,
                one.was_alone,
                wanted=wanted,
            )
            async with asyncio.timeout(PATIENCE_S if wanted else None) as patience:
                async for kind, data in stream:
                    patience.reschedule(None)
                    if kind not in (OFFER, ACCEPTED):
                        reason = kind
                        if data:
                            lease.refused_by = self._decode_offer(data).replica
                        continue
                    try:
                        link = self._links.open(self._decode_offer(data))
                        if not lease.misses_none(link):
                            raise LeaseLostError(_EARLIER_LINK)
                    except Exception:
                        # Its replica still holds a place for it.
                        stream.cancel()
                        raise
                    lease.offered = link
                    if kind == ACCEPTED:
                        is_placed, lease.link = True, link
                        settle(link)
        except (asyncio.CancelledError, TimeoutError) as error:
            if stream is not None:
                stream.cancel()
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            # Where a client comes through Serve's own proxy, Ray cancels with it what
            # was called for it, though a lease may be another request's by then.
            reason = "no answer" if isinstance(error, TimeoutError) else "lease ended"
        except Exception as error:
            reason = DIED if _lost_its_engine(error) else repr(error)
        finally:
            if not is_placed:
                settle(None)
        return reason


_UNSENDABLE: Final = (
    "The request holds what cannot be sent to an engine, such as a number beyond 64 "
    "bits."
)


def _lost_its_engine(error: Exception) -> bool:
    """Tell whether the engine, or the replica around it, died under a lease."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, EngineDeadError | RayActorError)


def lease_context() -> contextvars.Context:
    """Return the present request's context as its leases are to have it.

    Serve ends the calls that were made in a request's context with that request; leases
    end by themselves. What stays is the id under which replicas log them, and the span.
    """
    context = contextvars.copy_context()
    context.run(_leave_request)
    return context


def _leave_request() -> None:
    request = _serve_request_context.get()
    if request is not None:
        _serve_request_context.set(_RequestContext(request_id=request.request_id))
