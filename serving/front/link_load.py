"""What one replica has to do, as one front knows it between two messages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from policies.decisions.places import count_kept

if TYPE_CHECKING:
    from serving.replica.token_channel import ReplicaState

SPARE_SHARE: Final = 8
"""One in so many requests more than an engine has seats for may be leased, so that one
is there when a seat becomes free: a lease takes about as long as a step."""


class LinkLoad:
    """Counts what the replica said last and what this front has done since.

    Attributes:
        num_held: Requests of this front that the replica has.
        num_coming: Requests of this front that are on their way to it.
        num_prompt_tokens: Of this front's requests, which it has still to compute.
    """

    def __init__(self, num_seats: int) -> None:
        """Know of nothing yet.

        Args:
            num_seats: Requests that the replica's engine runs at once.
        """
        self.num_held = self.num_coming = self.num_prompt_tokens = 0
        self._num_seats = num_seats
        self._num_fronts = 1
        self._num_others = self._num_held_then = 0

    def take(self, state: ReplicaState) -> None:
        """Take over what the replica says, once what it ended is counted."""
        num_requests = state.num_running + state.num_waiting
        self._num_fronts = state.num_fronts
        # Until it speaks again, what this front adds or ends is counted by itself.
        self._num_held_then = self.num_held
        self._num_others = max(0, num_requests - self.num_held)

    @property
    def num_requests(self) -> int:
        """Requests that the replica has, or will have in a moment."""
        return self._num_others + self.num_held + self.num_coming

    @property
    def _num_to_lease(self) -> int:
        """Requests that all fronts together may have there."""
        return self._num_seats + math.ceil(self._num_seats / SPARE_SHARE)

    @property
    def num_spare(self) -> int:
        """Leases more than this front has there that are its part of all of them."""
        return math.ceil(self._num_to_lease / self._num_fronts) - self.num_held

    @property
    def num_kept_seats(self) -> int:
        """This front's part of those left to whoever has few, and no spare ones."""
        kept = math.ceil(self._num_seats / SPARE_SHARE) + count_kept(self._num_seats)
        return math.ceil(kept / self._num_fronts)

    @property
    def num_free_seats(self) -> int:
        """Requests that this front may add, if every front takes its part."""
        free = self._num_to_lease - self._num_others - self._num_held_then
        share = math.ceil(free / self._num_fronts)
        return max(0, share - (self.num_held - self._num_held_then))
