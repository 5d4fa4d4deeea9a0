"""Plain progress output that reads well in a terminal and in a log file."""

import contextlib
import sys
import time
from typing import Final

_REMIND_S: Final = 10.0


class Console:
    """Writes lines to stdout, each progress line with the seconds since the start."""

    def __init__(self) -> None:
        """Start the clock."""
        self._start_s = time.monotonic()
        self._last_step = ""
        self._last_step_s = self._start_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def step(self, text: str) -> None:
        """Write a progress line; the same line again only every ten seconds."""
        now_s = time.monotonic()
        if text == self._last_step and now_s - self._last_step_s < _REMIND_S:
            return
        self._last_step, self._last_step_s = text, now_s
        self.say(f"[{self.elapsed_s:5.1f} s] {text}")

    def say(self, text: str = "") -> None:
        """Write lines as they are; a terminal that is gone is no reason to fail."""
        with contextlib.suppress(OSError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def complain(text: str) -> None:
    """Write an error to stderr."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()
