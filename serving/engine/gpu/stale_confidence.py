"""Confidences of earlier drafts, standing in for those that only the device knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

UNKNOWN = 0.5
"""Confidence where nothing is known at all, before the first report."""


class StaleConfidence:
    """The latest reported confidences by request.

    Good enough to size a budget, which sums over the batch; which drafts are verified
    under it is decided on the device from those of the drafts themselves. Made before
    the drafts it stands for, so that no budget depends on a token drawn in them.
    """

    def __init__(self, max_depth: int, num_slots: int = 64) -> None:
        """Start without any request.

        Args:
            max_depth: Deepest draft.
            num_slots: Requests to have room for at first, >= 1.
        """
        # A row per slot; the last one stands for requests without a slot.
        self._values = np.full((num_slots + 1, max_depth), np.nan)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots))

    def __len__(self) -> int:
        """Return how many requests something is kept about."""
        return len(self._slots)

    def note(
        self,
        req_ids: Sequence[str],
        confidence: NDArray[np.floating[Any]],
        depths: NDArray[np.int64],
    ) -> None:
        """Keep the confidences of some requests.

        Args:
            req_ids: `[num_reqs]`, whose they are.
            confidence: `[num_reqs, num_steps]`, num_steps <= `max_depth`.
            depths: `[num_reqs]`, how many of them count. Deeper positions keep what
                they had when they were last drafted.
        """
        if not req_ids:
            return
        slots = [self._slots.get(req_id, -1) for req_id in req_ids]
        if -1 in slots:
            slots = [self._find_slot(req_id) for req_id in req_ids]
        num_steps = confidence.shape[1]
        is_new = np.arange(num_steps) < depths[:, None]
        kept = self._values[slots, :num_steps]
        self._values[slots, :num_steps] = np.where(is_new, confidence, kept)

    def forget(self, req_id: str) -> None:
        """Drop a finished request."""
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            self._values[slot] = np.nan
            self._free.append(slot)

    def guess(self, req_ids: Sequence[str], depth: int) -> NDArray[np.float64]:
        """Return confidences for these requests' next drafts.

        What a request has not shown yet is taken from the mean of the others at that
        position, then from the mean of all, then from `UNKNOWN`.

        Returns:
            `[num_reqs, depth]`, float64, 0-1.
        """
        slots = np.array([self._slots.get(r, -1) for r in req_ids], dtype=np.int64)
        known = self._values[slots, :depth]
        present = ~np.isnan(known)
        counts = present.sum(axis=0)
        sums = np.where(present, known, 0.0).sum(axis=0)
        overall = sums.sum() / counts.sum() if counts.sum() else UNKNOWN
        typical = np.where(counts > 0, sums / np.maximum(counts, 1), overall)
        filled: NDArray[np.float64] = np.where(present, known, typical)
        return filled

    def _find_slot(self, req_id: str) -> int:
        slot = self._slots.get(req_id)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[req_id] = self._free.pop()
        return slot

    def _grow(self) -> None:
        """Double the room; preempted requests come on top of those that run."""
        num_slots = len(self._values) - 1
        self._free = list(range(num_slots, 2 * num_slots))
        room = np.full((num_slots, self._values.shape[1]), np.nan)
        self._values = np.concatenate([self._values, room])
