"""Sessions: each prompt carries what was said before, and all begin alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .prefixes import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Sessions:
    """How requests belong together.

    Attributes:
        turns: Of a session, the mean of a geometric distribution, >= 1.
        think_s: Mean time between two of its requests, exponential. A turn comes
            whether or not the reply before it is there.
        system_tokens: At the beginning of all prompts of a kind.
    """

    turns: float
    think_s: float
    system_tokens: int


class Turns(NamedTuple):
    """Requests of sessions by time; `[num_turns]` but for `chain`.

    Attributes:
        arrival_s: float64, rising, from 0 on.
        session: Which each belongs to.
        num_prompt_tokens: Of all that was said before, too.
        num_output_tokens: Of the reply.
        chain: `[num_named]`, blocks of prompts and replies, one after another.
        chain_first: `[num_turns + 1]`, where each one's begin in it.
    """

    arrival_s: NDArray[np.float64]
    session: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    chain: NDArray[np.int64]
    chain_first: NDArray[np.int64]


def parse_sessions(text: str) -> Sessions:
    """Read `TURNS[:THINK_S[:SYSTEM_TOKENS]]`.

    Raises:
        ValueError: If it is none.
    """
    parts, limits = text.split(":"), ((1, 100), (1e-3, 1e4), (0, 1e5))
    try:
        values = [*map(float, parts), 10.0, 0.0][:3]
    except ValueError:
        values = [np.nan] * 3
    pairs = zip(values, limits, strict=True)
    if len(parts) > 3 or not all(low <= value <= high for value, (low, high) in pairs):
        raise ValueError(f"{text!r} is no TURNS[:THINK_S[:SYSTEM_TOKENS]]")
    return Sessions(values[0], values[1], int(values[2]))


def lay_out(
    sessions: Sessions,
    begin_s: NDArray[np.float64],
    kind: NDArray[np.int64],
    num_turns: NDArray[np.int64],
    num_added: NDArray[np.int64],
    num_output: NDArray[np.int64],
    rng: np.random.Generator,
) -> Turns:
    """Return the turns of sessions that come from time 0 on.

    Args:
        sessions: How they belong together.
        begin_s: `[num_sessions]`, of the first turn; before 0 for those under way.
        kind: `[num_sessions]`, 0 or 1.
        num_turns: `[num_sessions]`, >= 1.
        num_added: `[num_turns.sum()]`, tokens that a turn's prompt adds.
        num_output: Same shape, of its reply.
        rng: Draws the times between turns.
    """
    first = np.cumsum(num_turns) - num_turns
    session = np.repeat(np.arange(begin_s.size), num_turns)
    gaps_s = rng.exponential(sessions.think_s, session.size)
    gaps_s[first] = begin_s
    sums_s, sums = np.cumsum(gaps_s), np.cumsum(num_added + num_output)
    arrival_s = sums_s - (sums_s[first] - begin_s)[session]
    before = (sums - num_added - num_output)[first]
    end = sessions.system_tokens + sums - before[session]
    # Blocks of a session have names of their own, but for those that all have.
    num_shared = sessions.system_tokens // BLOCK_TOKENS
    most = np.maximum.reduceat(end, first) // BLOCK_TOKENS
    kept = np.flatnonzero(arrival_s >= 0.0)
    kept = kept[np.argsort(arrival_s[kept])]
    most[np.bincount(session[kept], minlength=most.size) == 0] = 0
    names = 2 * num_shared + np.cumsum(most) - most
    session, num_blocks = session[kept], end[kept] // BLOCK_TOKENS
    chain_first = np.append(0, np.cumsum(num_blocks))
    place = np.arange(chain_first[-1]) - np.repeat(chain_first[:-1], num_blocks)
    own, shared = (
        np.repeat(row[session], num_blocks) for row in (names, num_shared * kind)
    )
    return Turns(
        *(arrival_s[kept], session, end[kept] - num_output[kept], num_output[kept]),
        chain=place + np.where(place < num_shared, shared, own),
        chain_first=chain_first,
    )
