"""Processes that train one model together, each on its rows of every batch."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

_TIMEOUT_S = 900.0


class Team:
    """Single-threaded processes that meet twice a step.

    Threads of one operation meet thousands of times a step, and every meeting
    waits for the one that another program has displaced. On two cores with other
    work on them, two such processes train twice as fast as two threads.
    """

    def __init__(self, size: int) -> None:
        """Prepare a team of ``size`` processes, this one included."""
        self.size = size
        self.losses = torch.zeros(size).share_memory_()
        self._barrier = multiprocessing.get_context("fork").Barrier(size)
        self._stop = torch.zeros(1).share_memory_()

    def run(self, work: Callable[[int], None]) -> None:
        """Run ``work(rank)`` in every process; rank 0 is this one.

        Args:
            work: Called with each rank, in a fork of this process.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the step in progress is complete.
        """
        torch.set_num_threads(1)
        context = multiprocessing.get_context("fork")
        with self._deferred_interrupt():
            others = [
                context.Process(target=work, args=(rank,), daemon=True)
                for rank in range(1, self.size)
            ]
            for process in others:
                process.start()
            work(0)
            for process in others:
                process.join()
        if self.stopped:
            raise KeyboardInterrupt

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C was pressed; read it only right after :meth:`meet`."""
        return bool(self._stop[0] == 2)

    def meet(self, rank: int, *, end_of_step: bool = False) -> None:
        """Wait for the others.

        Args:
            rank: Who waits.
            end_of_step: Let rank 0 announce a pending Ctrl-C to all.

        Raises:
            RuntimeError: If another process has ended or hangs.
        """
        if end_of_step and rank == 0 and self._stop[0] == 1:
            self._stop[0] = 2
        try:
            self._barrier.wait(_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise RuntimeError(
                "a training process has ended or hangs; run the command again"
                " (it continues from the newest checkpoint)"
            ) from None

    @contextmanager
    def _deferred_interrupt(self) -> Iterator[None]:
        def note(_signal: int, _frame: FrameType | None) -> None:
            self._stop[0] = 1

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
