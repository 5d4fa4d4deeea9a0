"""Prefix caches: which blocks of prompts and replies a replica still has.

Blocks are named so that equal names stand for equal beginnings. Each row of `Prefixes`
is a list from the block that was met longest ago to the latest one; the last row is the
router's own memory, as `policies.decisions.prefix_holders` keeps it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.compiled import compiled
from policies.decisions.prefix_holders import NUM_PREFIXES, PREFIX_BLOCKS, PREFIX_TOKENS

BLOCK_TOKENS = PREFIX_TOKENS
"""Of a block, where a load does not say."""

HOLDER_TOKENS = NUM_PREFIXES * BLOCK_TOKENS
"""Remembered of prompts by a router: the capacity of `PrefixHolders`."""

LOOKED_AT = PREFIX_BLOCKS * BLOCK_TOKENS
"""Tokens of a prompt that a router looks at, likewise."""

_ABSENT = -1


class Prefixes(NamedTuple):
    """Rings through the blocks that are there; the last column is where each begins."""

    # `[num_replicas + 1, num_blocks + 1]`, -1 for a block that is not there.
    before: NDArray[np.int32]
    after: NDArray[np.int32]  # same shape
    size: NDArray[np.int64]  # `[num_replicas + 1]`, blocks there
    holder: NDArray[np.int64]  # `[num_blocks]`, replica that last got a prompt with it
    block_tokens: int  # of each block


def make_prefixes(num_replicas: int, num_blocks: int, block_tokens: int) -> Prefixes:
    """Return empty caches; 8 bytes for each block and replica."""
    rings = np.full((2, num_replicas + 1, num_blocks + 1), _ABSENT, np.int32)
    rings[:, :, num_blocks] = num_blocks
    holder = np.zeros(num_blocks, np.int64)
    sizes = np.zeros(num_replicas + 1, np.int64)
    return Prefixes(rings[0], rings[1], sizes, holder, block_tokens)


@compiled
def count_known(prefixes: Prefixes, row: int, chain: NDArray[np.int64]) -> int:
    """Return how many of the first blocks of a chain are there."""
    known = 0
    while known < chain.size and prefixes.after[row, chain[known]] != _ABSENT:
        known += 1
    return known


@compiled
def keep(
    prefixes: Prefixes, row: int, chain: NDArray[np.int64], num_tokens: int
) -> None:
    """Note that a chain was met, and drop what has no room in so many tokens.

    Ends go before beginnings, without which they are of no use.
    """
    before, after, end = prefixes.before[row], prefixes.after[row], prefixes.holder.size
    for place in range(chain.size - 1, -1, -1):
        block = chain[place]
        if after[block] == _ABSENT:
            prefixes.size[row] += 1
        else:
            after[before[block]], before[after[block]] = after[block], before[block]
        before[block], after[block] = before[end], end
        after[before[end]] = block
        before[end] = block
    while prefixes.size[row] > max(0, num_tokens // prefixes.block_tokens):
        oldest = after[end]
        after[end] = after[oldest]
        before[after[oldest]] = end
        before[oldest] = after[oldest] = _ABSENT
        prefixes.size[row] -= 1
