"""Whether the machine is itself: a fixed computation, timed between turns.

A virtual machine shares its host. There are spells of seconds in which every step of
every engine takes two to four times its time; a turn in such a spell says nothing about
the policy whose turn it happens to be.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUT_OF_LINE = 1.6
"""Times the usual duration. A calm machine exceeds 1.3 now and then."""

STOLEN_SHARE = 0.02
"""Of the machine, taken by the host during a turn."""

MAX_WAIT_S = 15.0
"""Spells last about ten seconds."""

PAUSE_S = 0.25
"""Between two looks while waiting."""

NUM_KEPT = 201
"""Readings whose median is the usual duration."""

NUM_FIRST = 15
"""Readings before the first turn."""

_SIZE = 1 << 16
_REPEATS = 64


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the machine showed.

    Attributes:
        is_calm: Whether it was itself, at least in the end.
        waited_s: For how long it was waited for.
    """

    is_calm: bool
    waited_s: float


class Yardstick:
    """Times a fixed computation on all cores, a few milliseconds of work."""

    def __init__(
        self,
        measure: Callable[[], float] | None = None,
        read_stolen_s: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Learn what is usual.

        Args:
            measure: Seconds of the fixed computation.
            read_stolen_s: Core seconds that the host took, ever growing.
            sleep: For so many seconds.
            clock: Seconds.
        """
        self._measure = measure or _FixedComputation()
        self._read_stolen_s = read_stolen_s or _stolen_s
        self._sleep = sleep
        self._clock = clock
        self._usual: deque[float] = deque(maxlen=NUM_KEPT)
        self._began_s = self._stolen_s = 0.0
        for _ in range(NUM_FIRST):
            self._usual.append(self._measure())

    def before_turn(self) -> Look:
        """Wait until the machine is itself; give up after `MAX_WAIT_S`.

        A machine that has become slower for good is as it is from then on: what was
        usual is forgotten when waiting was in vain.
        """
        began_s = self._clock()
        reading = self._read()
        is_calm = self._is_usual(reading)
        while not is_calm and self._clock() - began_s < MAX_WAIT_S:
            self._sleep(PAUSE_S)
            reading = self._measure()
            is_calm = self._is_usual(reading)
        if not is_calm:
            self._usual.clear()
            self._usual.append(reading)
        self._began_s, self._stolen_s = self._clock(), self._read_stolen_s()
        return Look(is_calm, self._began_s - began_s)

    def after_turn(self) -> bool:
        """Tell whether the machine was itself during the turn and is at its end."""
        spent_s = self._clock() - self._began_s
        stolen_s = self._read_stolen_s() - self._stolen_s
        share = stolen_s / (max(spent_s, 1e-9) * (psutil.cpu_count() or 1))
        return self._is_usual(self._read()) and share <= STOLEN_SHARE

    def _read(self) -> float:
        reading = self._measure()
        self._usual.append(reading)
        return reading

    def _is_usual(self, reading: float) -> bool:
        return reading <= OUT_OF_LINE * statistics.median(self._usual)


class _FixedComputation:
    """A thread to a core, of our own: those of a BLAS spin on after they are done.

    For 100 ms, which is in the way of the next engine.
    """

    def __init__(self) -> None:
        # Bound to their cores: woken up together, two would often share one.
        self._threads = [
            ThreadPoolExecutor(
                1, initializer=os.sched_setaffinity, initargs=(0, {core})
            )
            for core in sorted(os.sched_getaffinity(0))
        ]
        self._results = [np.empty(_SIZE) for _ in self._threads]
        self._operand = np.linspace(-1.0, 1.0, _SIZE)
        self()

    def __call__(self) -> float:
        """Return the best of three, in seconds: threads may wake up late."""
        return min(self._time() for _ in range(3))

    def _time(self) -> float:
        began_s = time.perf_counter()
        working = [
            thread.submit(self._work, result)
            for thread, result in zip(self._threads, self._results, strict=True)
        ]
        for one in working:
            one.result()
        return time.perf_counter() - began_s

    def _work(self, result: NDArray[np.float64]) -> None:
        for _ in range(_REPEATS):
            np.exp(self._operand, out=result)


def _stolen_s() -> float:
    """Return the core seconds that a host took; 0 where the system does not say."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
