"""How often a stream is handed on: at once, but not more than once an interval."""

import asyncio
import functools
import math
from typing import Any

from serving.engine.compat import async_llm


class PacedCollector(async_llm.RequestOutputCollector):
    """vLLM's collector of one request's outputs, which it hands on in good time.

    The first output and the last go out at once. In between the reader waits until an
    interval has passed, and vLLM merges what comes meanwhile: an engine with short
    steps does not pay for a chunk encoded and sent in each. An exception goes out at
    once too and, as is vLLM's way, in place of what has not been read.
    """

    def __init__(self, output_kind: Any, request_id: str, *, interval_s: float) -> None:
        """Collect for one request.

        Args:
            output_kind: vLLM's; only deltas come more than once.
            request_id: vLLM's own.
            interval_s: Seconds, >= 0.
        """
        super().__init__(output_kind, request_id)
        self._interval_s = interval_s
        self._due_s = -math.inf
        # Set while there is an output that may go; the timer is for one that waits.
        self._may_go = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: Any) -> None:
        """Add an output to what waits."""
        super().put(output)
        if isinstance(output, Exception) or output.finished:
            self._let_go()
        elif self._timer is None and not self._may_go.is_set():
            loop = asyncio.get_running_loop()
            if loop.time() < self._due_s:
                self._timer = loop.call_at(self._due_s, self._let_go)
            else:
                self._let_go()

    async def get(self) -> Any:
        """Wait for an output and until it may go."""
        await self._may_go.wait()
        self._may_go.clear()
        self._due_s = asyncio.get_running_loop().time() + self._interval_s
        return await super().get()

    def close(self) -> None:
        """Let nobody read any more."""
        super().close()
        self._stop_timer()

    def _let_go(self) -> None:
        self._stop_timer()
        self._may_go.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def get_nowait(self) -> Any:
        """Leave everything to `get`: what is here may have to wait."""
        return None


def pace_streams(interval_s: float) -> None:
    """Have the engines of this process hand streams on at most once an interval.

    A patch: `AsyncLLM` makes its collectors by a name of its module.

    Args:
        interval_s: Seconds, >= 0.
    """
    async_llm.RequestOutputCollector = functools.partial(
        PacedCollector, interval_s=interval_s
    )
