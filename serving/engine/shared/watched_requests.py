"""Where the watchdog keeps what it knows of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.estimators.acceptance_watch import NUM_CLASSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.estimators.acceptance_watch import AcceptanceWatch
    from serving.engine.compat import Request
    from serving.engine.shared.request_classes import RequestClasses


class WatchedRequests:
    """Gives each request a slot in the watch's arrays, and takes it back."""

    def __init__(self, watch: AcceptanceWatch, classes: RequestClasses) -> None:
        """Know of no request."""
        self._watch, self._classes = watch, classes
        # Of each request: its slot, and its class.
        self._places: dict[str, tuple[int, int]] = {}
        self._num_slots = 0
        # Of requests that have ended, the latter with outcomes that may be unread.
        self._free: list[int] = []
        self._left: list[int] = []

    def place(self, request: Request) -> tuple[int, int]:
        """Return a request's slot and class, a new slot for a new request."""
        place = self._places.get(request.request_id)
        if place is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._num_slots = self._num_slots, self._num_slots + 1
            self._watch.reset_request(slot)
            class_index = self._classes.index_of(request)
            place = slot, min(class_index, NUM_CLASSES - 1)
            self._places[request.request_id] = place
        return place

    def place_all(
        self, requests: Sequence[Request]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the slots and the classes of some requests, one at least."""
        find = self._places.get
        places = [find(one.request_id) or self.place(one) for one in requests]
        slots, classes = zip(*places, strict=True)
        return slots, classes

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended; its slot waits for `free_left`."""
        place = self._places.pop(req_id, None)
        if place is not None:
            self._left.append(place[0])

    def free_left(self) -> None:
        """Let others have the slots of whom nothing is unread any more."""
        self._free += self._left
        self._left = []
