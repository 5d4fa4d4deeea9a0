"""Progress on standard error: a bar in a terminal, lines in a log."""

import statistics
import sys
import time
from collections import Counter, defaultdict
from datetime import timedelta

_BAR_WIDTH = 24
_LINE_PERIOD_S = 20.0


class Progress:
    """Counts finished measurements and estimates the time that is left.

    Draws only when told that something has happened, so that it takes no time from
    what is measured.
    """

    def __init__(self, total: int) -> None:
        """Begin with so many to be made."""
        self._total, self._num_done = total, 0
        self._stream = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._last_line_s = float("-inf")
        self._durations: dict[str, list[float]] = defaultdict(list)
        self._to_come: Counter[str] = Counter()

    def expect(self, kind: str, count: int) -> None:
        """Announce measurements of one kind, which take about equally long."""
        self._to_come[kind] += count

    def advance(self, kind: str, duration_s: float, label: str) -> None:
        """Count one finished measurement."""
        self._num_done += 1
        self._to_come[kind] -= kind in self._to_come
        self._durations[kind].append(duration_s)
        self.show(label)

    def show(self, label: str) -> None:
        """Say what goes on."""
        share = self._num_done / max(1, self._total)
        left = f"{self._left()} left" if self._durations else "measuring"
        text = f"{self._num_done}/{self._total} {share:4.0%}  {left}  {label}"
        if self._is_terminal:
            bar = "#" * round(_BAR_WIDTH * share)
            self._stream.write(f"\r\x1b[K[{bar:.<{_BAR_WIDTH}}] {text}")
            self._stream.flush()
        elif (
            self._num_done == self._total
            or time.monotonic() - self._last_line_s > _LINE_PERIOD_S
        ):
            self._last_line_s = time.monotonic()
            self.say(text)

    def say(self, text: str) -> None:
        """Write a line of its own."""
        clear = "\r\x1b[K" if self._is_terminal else ""
        self._stream.write(f"{clear}{text}\n")
        self._stream.flush()

    def _left(self) -> timedelta:
        """Estimate the time left from the measurements of the same kinds so far."""
        known = {kind: statistics.fmean(d) for kind, d in self._durations.items()}
        typical = statistics.fmean(known.values())
        left = (
            count * known.get(kind, typical) for kind, count in self._to_come.items()
        )
        return timedelta(seconds=round(sum(left)))
