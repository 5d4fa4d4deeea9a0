"""Confidences of earlier drafts, standing in for those that only the device knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    def __init__(self, max_depth: int) -> None:
        """Start without any request."""
        self._max_depth = max_depth
        self._rows: dict[str, NDArray[np.float64]] = {}

    def note(self, req_id: str, confidence: NDArray[np.float64]) -> None:
        """Keep a request's confidences.

        Args:
            req_id: Whose they are.
            confidence: `[depth]`, depth <= `max_depth`. Deeper positions keep what
                they had when they were last drafted.
        """
        row = self._rows.setdefault(req_id, np.full(self._max_depth, np.nan))
        row[: confidence.size] = confidence

    def forget(self, req_id: str) -> None:
        """Drop a finished request."""
        self._rows.pop(req_id, None)

    def guess(self, req_ids: Sequence[str], depth: int) -> NDArray[np.float64]:
        """Return confidences for these requests' next drafts.

        What a request has not shown yet is taken from the mean of the others at that
        position, then from the mean of all, then from `UNKNOWN`.

        Returns:
            `[num_reqs, depth]`, float64, 0-1.
        """
        unknown = np.full(self._max_depth, np.nan)
        rows = [self._rows.get(req_id, unknown)[:depth] for req_id in req_ids]
        known = np.array(rows).reshape(len(req_ids), depth)
        present = ~np.isnan(known)
        counts = present.sum(axis=0)
        sums = np.where(present, known, 0.0).sum(axis=0)
        overall = sums.sum() / counts.sum() if counts.sum() else UNKNOWN
        typical = np.where(counts > 0, sums / np.maximum(counts, 1), overall)
        filled: NDArray[np.float64] = np.where(present, known, typical)
        return filled
