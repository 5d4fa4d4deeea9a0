"""All of a front's links to replicas, and the steps that come over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import zmq
from vllm.v1.engine.exceptions import EngineDeadError

from serving.engine.compat import EngineCoreOutputs, MsgpackDecoder
from serving.front.failures import DIED
from serving.front.token_link import TokenLink

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from serving.front.token_link import OnLost, OnState
    from serving.replica.token_channel import LinkOffer

    OnStep = Callable[[TokenLink, Any], None]


_NUM_DEAD: Final = 64
"""That are remembered: for longer than it takes until nothing asks them any more."""


class TokenLinks:
    """One link to each replica from which something is leased.

    Attributes:
        all: Those there are now.
    """

    def __init__(
        self, front: bytes, on_step: OnStep, on_state: OnState, on_lost: OnLost
    ) -> None:
        """Connect to nothing yet.

        Args:
            front: The front's name, unique in the cluster.
            on_step: Given each step of an engine, as vLLM's `EngineCoreOutputs`.
            on_state: Told of each message, after its step.
            on_lost: Told of each link once, with the reason.
        """
        self._front = front
        self._on_step = on_step
        self._on_state = on_state
        self._on_lost = on_lost
        self._context: zmq.Context[Any] = zmq.Context()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._links: dict[str, TokenLink] = {}
        self._dead: list[str] = []
        self._known: set[str] = set()
        self.all: tuple[TokenLink, ...] = ()

    def __len__(self) -> int:
        """Return how many replicas are connected."""
        return len(self._links)

    def __iter__(self) -> Iterator[TokenLink]:
        """Iterate over the links there are now."""
        return iter(self.all)

    def find(self, replica: str) -> TokenLink | None:
        """Return the link to a replica, None if there is none."""
        return self._links.get(replica)

    def open(self, offer: LinkOffer) -> TokenLink:
        """Return the link to a replica, a new one if there is none.

        Raises:
            EngineDeadError: It has said so: until its actor ends, half a second later
                at times, it goes on taking leases that nobody will run.
        """
        if offer.replica in self._dead:
            raise EngineDeadError
        link = self._links.get(offer.replica)
        if link is None:
            link = self._links[offer.replica] = TokenLink(
                self._context,
                self._front,
                offer,
                self._take,
                self._on_state,
                self._lose,
                is_first=offer.replica not in self._known,
            )
            self._known.add(offer.replica)
            self.all = tuple(self._links.values())
        return link

    def tell_waiting(self, num_waiting: int, takers: Collection[TokenLink]) -> None:
        """Tell those that may take it what waits for any of them, each its share."""
        share = math.ceil(num_waiting / max(1, len(takers)))
        for link in self:
            link.tell_waiting(share if link in takers else 0)

    def close(self) -> None:
        """Lose all of them."""
        for link in self:
            link.close("shutdown")
        self._context.destroy(linger=0)

    def _take(self, link: TokenLink, frames: Sequence[Any]) -> None:
        self._on_step(link, self._decoder.decode(frames))

    def _lose(self, link: TokenLink, reason: str) -> None:
        self._links.pop(link.offer.replica, None)
        if reason == DIED:
            self._dead = [*self._dead, link.offer.replica][-_NUM_DEAD:]
        self.all = tuple(self._links.values())
        self._on_lost(link, reason)
