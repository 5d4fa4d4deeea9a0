"""Whether an engine still answers: one that hangs looks idle, and draws requests."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NoReturn

import psutil

_LOOK_S: Final = 1.0


class EngineWatch:
    """Asks the engine something small, again and again.

    An engine answers between two steps, so the time it is given must exceed its longest
    step. While a load is known to go on, it is given as long as a start.
    """

    def __init__(self, hang_timeout_s: float, load_timeout_s: float) -> None:
        """Watch nothing yet.

        Args:
            hang_timeout_s: Longest silence of a working engine, seconds.
            load_timeout_s: Longest silence of one that loads or compiles, seconds.
        """
        self._hang_timeout_s = hang_timeout_s
        self._load_timeout_s = load_timeout_s
        self._num_loads = 0
        self._silent_s = 0.0

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Be patient within this block."""
        self._num_loads += 1
        try:
            yield
        finally:
            self._num_loads -= 1
            # Nobody could be asked meanwhile.
            self._silent_s = 0.0

    async def wait_until_hung(self, ask: Callable[[], Awaitable[object]]) -> float:
        """Return the seconds of silence once they are too many; else never.

        Silence is counted in looks, not read from a clock: while this process itself
        stands still, it hears nothing either.

        Args:
            ask: Asks the engine. A failure is an answer too: whether the engine died
                is for others to tell.
        """
        while True:
            question = asyncio.ensure_future(ask())
            self._silent_s = 0.0
            while not (await asyncio.wait({question}, timeout=_LOOK_S))[0]:
                self._silent_s += _LOOK_S
                if self._silent_s >= self._timeout_s:
                    question.cancel()
                    return self._silent_s
            # Looked at here, or asyncio complains.
            question.exception()
            await asyncio.sleep(_LOOK_S)

    @property
    def _timeout_s(self) -> float:
        longest_s = max(self._hang_timeout_s, self._load_timeout_s)
        return longest_s if self._num_loads else self._hang_timeout_s


def end_process(logger: logging.Logger) -> NoReturn:
    """End this process, and all below it, with what was logged so far written."""
    for handler in logger.handlers:
        handler.flush()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)
