"""Bookkeeping for a drafter that is skipped: what its KV cache lacks, and where.

Skipping the drafter altogether (cold depth 0) leaves holes in its KV cache. Target and
drafter share block ids, so a block that prefix caching hands to another request may
lack the drafter's half. Both are remembered here and filled before drafting resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MissingSpan:
    """Positions `start..end - 1` of the request in batch row `row` to be filled."""

    row: int
    start: int
    end: int


@dataclass(slots=True)
class DrafterCache:
    """Which positions of which request, and which blocks, lack the drafter's KV.

    A request's drafter cache is complete up to a first missing position and, once
    steps were skipped, missing from there to the start of the running step. One number
    per request is therefore enough.

    Attributes:
        block_size: Positions per KV block.
    """

    block_size: int
    _missing_from: dict[str, int] = field(default_factory=dict)
    _incomplete_blocks: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is known to be missing anywhere."""
        return not self._missing_from and not self._incomplete_blocks

    def admit(self, req_id: str, num_cached: int, blocks: NDArray[np.int32]) -> None:
        """Take in a request that is new, or resumed after preemption.

        Args:
            req_id: The request.
            num_cached: Leading positions that prefix caching supplied.
            blocks: `[>= num_cached / block_size]`, the request's block ids.
        """
        self._missing_from.pop(req_id, None)
        if not self._incomplete_blocks:
            return
        for index in range(-(-num_cached // self.block_size)):
            if int(blocks[index]) in self._incomplete_blocks:
                self._missing_from[req_id] = index * self.block_size
                return

    def skip(
        self, req_id: str, start: int, num_tokens: int, blocks: NDArray[np.int32]
    ) -> None:
        """Note that a step's `num_tokens` positions from `start` were not drafted."""
        self._missing_from.setdefault(req_id, start)
        self._incomplete_blocks.update(self._touched(start, num_tokens, blocks))

    def doubt(self, req_id: str) -> None:
        """Take all of a request's positions for missing."""
        self._missing_from[req_id] = 0

    def fill(
        self,
        req_ids: Sequence[str],
        starts: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        blocks: NDArray[np.int32],
    ) -> dict[int, int]:
        """Note that the drafter is about to run on a step.

        Args:
            req_ids: The requests of the step.
            starts: `[num_reqs]`, the first position of each.
            num_tokens: `[num_reqs]`, how many positions it has.
            blocks: `[num_reqs, max_blocks]`, their block ids.

        Returns:
            By row, the first position that must be filled before, up to its start;
            without rows that lack nothing.
        """
        if self.is_complete:
            return {}
        firsts: dict[int, int] = {}
        begins = starts.astype(np.int64)
        if self._missing_from:
            for row, req_id in enumerate(req_ids):
                first = self._missing_from.pop(req_id, None)
                if first is not None and first < begins[row]:
                    begins[row] = firsts[row] = first
        # What requests that ended left incomplete stays so until somebody reuses it,
        # so steps come here for long: all rows are looked at together.
        first_block = begins // self.block_size
        ends = np.maximum(starts + num_tokens, begins + 1)
        last_block = np.minimum((ends - 1) // self.block_size, blocks.shape[1] - 1)
        num_blocks = last_block - first_block + 1
        rows, offsets = np.nonzero(
            np.arange(num_blocks.max(initial=0)) < num_blocks[:, None]
        )
        touched: list[int] = blocks[rows, first_block[rows] + offsets].tolist()
        self._incomplete_blocks.difference_update(touched)
        return firsts

    def prune(self, live: Collection[str]) -> None:
        """Forget requests that ended without being seen again."""
        if len(self._missing_from) > 2 * len(live) + 16:
            self._missing_from = {
                req_id: start
                for req_id, start in self._missing_from.items()
                if req_id in live
            }

    def _touched(
        self, start: int, num_tokens: int, blocks: NDArray[np.int32]
    ) -> list[int]:
        first = start // self.block_size
        last = (start + max(num_tokens, 1) - 1) // self.block_size
        touched: list[int] = blocks[first : last + 1].tolist()
        return touched


def split_spans(
    spans: Sequence[MissingSpan], max_tokens: int
) -> list[list[MissingSpan]]:
    """Pack spans into passes of at most `max_tokens`, cutting long ones.

    A request appears at most once per pass, and its pieces in rising order, so that
    every position finds the ones before it in the cache.
    """
    passes: list[list[MissingSpan]] = []
    current: list[MissingSpan] = []
    room = max_tokens
    for span in spans:
        start = span.start
        while start < span.end:
            if room == 0:
                passes.append(current)
                current, room = [], max_tokens
            end = min(span.end, start + room)
            current.append(MissingSpan(span.row, start, end))
            room -= end - start
            start = end
    if current:
        passes.append(current)
    return passes
