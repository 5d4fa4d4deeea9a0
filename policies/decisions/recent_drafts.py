"""Recent drafts, which stand for the next ones when the depth is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled
from policies.decisions.depth import estimate_depths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from policies.decisions.depth import DepthEstimate

    _Drafts = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64] | None]

NUM_REMEMBERED_DRAFTS = 96
"""A few steps of a large batch, about a hundred steps of a single request."""

NUM_SAMPLES = 8
"""Order statistics that stand for the distribution of recent acceptances."""

MAX_UNREAD = 16
"""Steps whose drafts wait to be filed, at most."""


@dataclass(slots=True)
class RecentDrafts:
    """A ring of predicted acceptances, `[num_remembered, max_depth]`.

    Positions that a draft did not have are filled in from those that recent drafts
    had, verified or not, drawn from all of them. A mean would not do: what is verified
    is the good part of a wide spread. Nor would what was verified alone: a draft that
    ended because nothing more was to be gained would look as if it had been the best.

    Source: ours.
    """

    max_depth: int
    _acceptance: NDArray[np.float64] = field(init=False)
    _weights: NDArray[np.float64] = field(init=False)
    _draws: NDArray[np.int64] = field(init=False)
    _num_seen: int = field(init=False, default=0)
    _unread: list[_Drafts] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Start with one draft that nothing is known about."""
        # NaN past what a draft had.
        self._acceptance = np.full((NUM_REMEMBERED_DRAFTS, self.max_depth), np.nan)
        self._weights = np.ones(NUM_REMEMBERED_DRAFTS)
        # Kronecker sequences, one to a position: even and unlike each other, and
        # always the same, for a plan depends on what was seen, not on luck.
        rows, positions = np.ogrid[1 : NUM_REMEMBERED_DRAFTS + 1, : self.max_depth]
        evenly = (rows * np.sqrt(positions + 2.5)) % 1.0
        self._draws = (NUM_SAMPLES * evenly).astype(np.int64)

    def remember(
        self,
        acceptance: NDArray[np.float64],
        num_draft_tokens: NDArray[np.int64],
        weights: NDArray[np.float64] | None,
    ) -> None:
        """Take in a step's drafts, as they were predicted before their verification.

        Args:
            acceptance: `[num_reqs, depth]`, 0-1.
            num_draft_tokens: `[num_reqs]`; requests without drafts are left out.
            weights: `[num_reqs]`, mean 1; None for all the same.
        """
        # Filed together when somebody asks: a step has better things to do.
        self._unread.append((acceptance, num_draft_tokens, weights))
        if len(self._unread) >= MAX_UNREAD:
            self._read()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        first, num_left = len(unread), 0
        while first > 0 and num_left < NUM_REMEMBERED_DRAFTS:
            first -= 1
            num_left += int(np.count_nonzero(unread[first][1]))
        # What those that follow would overwrite is counted, not filed.
        for _, num_draft_tokens, _ in unread[:first]:
            self._num_seen += int(np.count_nonzero(num_draft_tokens))
        for acceptance, num_draft_tokens, weights in unread[first:]:
            self._num_seen = _append(
                self._acceptance,
                self._weights,
                self._num_seen,
                np.ascontiguousarray(acceptance),
                num_draft_tokens,
                _NO_WEIGHTS if weights is None else weights,
            )

    def estimate_depths(
        self, typical: NDArray[np.float64], sample: NDArray[np.float64] | None = None
    ) -> DepthEstimate:
        """Return expected tokens and drafts by depth and threshold.

        Args:
            typical: `[max_depth]`, 0-1, acceptance while there is no recent draft.
            sample: What `sample_acceptance` returns, by whoever has it.
        """
        filled = self._fill(typical, sample)
        # A batch's mean was 1, of its requests without drafts too: theirs are not here.
        weights = self._weights[: self._num_rows]
        return estimate_depths(filled, weights / weights.mean())

    def sample_acceptance(self) -> NDArray[np.float64]:
        """Return evenly spaced order statistics of all recent acceptances.

        Returns:
            `[<= NUM_SAMPLES]`, rising; empty before the first draft.
        """
        self._read()
        recent = self._acceptance[: self._num_rows]
        known = np.sort(recent[~np.isnan(recent)])
        if known.size <= NUM_SAMPLES:
            return known
        middles = (np.arange(NUM_SAMPLES) + 0.5) * (known.size / NUM_SAMPLES)
        sample: NDArray[np.float64] = known[middles.astype(np.int64)]
        return sample

    @property
    def _num_rows(self) -> int:
        return max(1, min(self._num_seen, NUM_REMEMBERED_DRAFTS))

    def _fill(
        self, typical: NDArray[np.float64], sample: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        self._read()
        if sample is None:
            sample = self.sample_acceptance()
        recent = self._acceptance[: self._num_rows]
        drawn = np.broadcast_to(typical, recent.shape)
        if sample.size == NUM_SAMPLES:
            drawn = sample[self._draws[: self._num_rows]]
        return np.where(np.isnan(recent), drawn, recent)


_NO_WEIGHTS = np.empty(0)


@compiled
def _append(
    ring: NDArray[np.float64],
    ring_weights: NDArray[np.float64],
    num_seen: int,
    acceptance: NDArray[np.float64],
    num_draft_tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
) -> int:
    """Put a step's drafts into the ring; return how many there have been now.

    Args:
        ring: `[num_remembered, max_depth]`, changed in place.
        ring_weights: `[num_remembered]`, likewise.
        num_seen: Drafts before these.
        acceptance: `[num_reqs, depth]`.
        num_draft_tokens: `[num_reqs]`, 0..depth; requests without drafts are left out.
        weights: `[num_reqs]`; empty for all the same.
    """
    for row in range(num_draft_tokens.size):
        length = num_draft_tokens[row]
        if length == 0:
            continue
        slot = num_seen % ring_weights.size
        for position in range(ring.shape[1]):
            known = position < length
            ring[slot, position] = acceptance[row, position] if known else np.nan
        ring_weights[slot] = weights[row] if weights.size > 0 else 1.0
        num_seen += 1
    return num_seen
