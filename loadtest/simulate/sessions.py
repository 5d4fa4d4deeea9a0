"""Sessions: each prompt carries what was said before, and all begin alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .drawn import Drawn
from .prefixes import BLOCK_TOKENS
from .readers import number
from .state import Floats, Ints


@dataclass(frozen=True, slots=True)
class Sessions:
    """How requests belong together."""

    turns: float  # of a session, the mean of a geometric distribution, >= 1
    # Mean time between two of its requests, exponential. A turn comes whether or not
    # the reply before it is there.
    think_s: float
    system_tokens: int  # at the beginning of all prompts of a kind


def parse_sessions(text: str) -> Sessions:
    """Read `TURNS[:THINK_S[:SYSTEM_TOKENS]]`.

    Raises:
        ArgumentTypeError: If it is none.
    """
    turns, think_s, system, *_ = [*text.split(":", 2), "", ""]
    return Sessions(
        number(1, 100)(turns),
        number(1e-3, 1e4)(think_s or "10"),
        int(number(0, 1e5)(system or "0")),
    )


def lay_out(
    sessions: Sessions,
    begin_s: Floats,
    kind: Ints,
    num_turns: Ints,
    num_added: Ints,
    num_output: Ints,
    rng: np.random.Generator,
) -> Drawn:
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
    return Drawn(
        *(arrival_s[kept], end[kept] - num_output[kept], num_output[kept]),
        kind[session],
        chain=place + np.where(place < num_shared, shared, own),
        chain_first=chain_first,
    )
