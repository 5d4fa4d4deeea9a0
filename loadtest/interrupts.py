"""Signals that ask a benchmark to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

_asked = Event()


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt while a block runs.

    Shells start background jobs with SIGINT ignored.
    """
    _asked.clear()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, _interrupt)) for number in signals]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt again: what is raised inside a finaliser gets lost."""
    if _asked.is_set():
        raise KeyboardInterrupt


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt
