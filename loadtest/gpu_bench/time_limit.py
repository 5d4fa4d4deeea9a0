"""Decides what still fits into a part's time."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_GUESS_S = {"start": 55.0, "cell": 8.0}
"""Until something of the kind has been timed."""

MARGIN = {"start": 1.1, "cell": 1.3}
"""Starts of one pair's engines take about as long as each other; cells do not."""


class TimeLimit:
    """A deadline, and how long things took so far."""

    def __init__(
        self, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock.

        Args:
            limit_s: From now.
            clock: Seconds.
        """
        self._clock = clock
        self._deadline_s = clock() + limit_s
        self._longest_s: dict[str, float] = {}

    def share(self, num_shares: int) -> TimeLimit:
        """Return the limit of the next of so many equal shares of what is left.

        What one of them leaves over is the others'; what was timed under it is known
        under this one too.
        """
        part = TimeLimit(self.left_s() / num_shares, self._clock)
        part._longest_s = self._longest_s
        return part

    def left_s(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._deadline_s - self._clock())

    def fits(self, kind: str) -> bool:
        """Tell whether one more of this kind is likely to be done in time."""
        expected_s = self._longest_s.get(kind, FIRST_GUESS_S[kind])
        return self.left_s() >= MARGIN[kind] * expected_s

    def note(self, kind: str, duration_s: float) -> None:
        """Remember how long one took."""
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), duration_s)
