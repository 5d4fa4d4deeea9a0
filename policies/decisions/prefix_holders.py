"""Which replica has computed which beginning of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX_TOKENS = 128
"""Beginnings of prompts are told apart by so many tokens."""

PREFIX_BLOCKS = 32
"""Blocks of a prompt that are looked at."""

NUM_PREFIXES = 1 << 18
"""Blocks remembered: what 64 replicas have between two turns of 10,000 sessions. About
100 bytes each, where they are used."""


class PrefixHolders:
    """Remembers which replica has computed which beginning of a prompt.

    Holders may have dropped it since: what is not in the cache costs its computation,
    as it would elsewhere.
    """

    def __init__(
        self,
        block_tokens: int = PREFIX_TOKENS,
        max_blocks: int = PREFIX_BLOCKS,
        capacity: int = NUM_PREFIXES,
    ) -> None:
        """Remember nothing yet.

        Args:
            block_tokens: Beginnings are told apart by so many tokens.
            max_blocks: Blocks of a prompt that are looked at.
            capacity: Blocks remembered; those not met for longest go first.
        """
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._capacity = capacity
        self._holders: dict[int, str] = {}

    def find(self, token_ids: Sequence[int]) -> tuple[str, int] | None:
        """Return who holds the longest beginning, and its tokens; None if nobody."""
        found = None
        for number, key in enumerate(self._keys(token_ids), start=1):
            holder = self._holders.get(key)
            if holder is None:
                break
            found = holder, number * self._block_tokens
        return found

    def note(self, token_ids: Sequence[int], replica: str) -> None:
        """Remember that a replica computes this prompt.

        Ends are forgotten before beginnings, without which they are of no use.
        """
        for key in reversed(self._keys(token_ids)):
            self._holders.pop(key, None)
            self._holders[key] = replica
        while len(self._holders) > self._capacity:
            del self._holders[next(iter(self._holders))]

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        size, keys, key = self._block_tokens, [], 0
        num_blocks = min(self._max_blocks, len(token_ids) // size)
        for begin in range(0, num_blocks * size, size):
            key = hash((key, tuple(token_ids[begin : begin + size])))
            keys.append(key)
        return keys
