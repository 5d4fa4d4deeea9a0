"""How often a stream is handed on: at once, but not more than once an interval."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterable
from typing import TypeVar

T = TypeVar("T")


async def pace(
    stream: AsyncIterable[T], interval_s: float
) -> AsyncGenerator[list[T], None]:
    """Yield what has come, in order, in lists.

    The first item and the last go out at once. In between, items wait until
    `interval_s` have passed since the last list, so that an engine with short steps
    does not pay Serve's price of a message for every token. Nothing wakes up while
    nothing comes: Ray's own batcher looks every interval, for every stream, and holds
    back the first token for up to one.

    Args:
        stream: Read as fast as it gives.
        interval_s: Seconds, >= 0.

    Raises:
        Exception: What `stream` raises, after everything that came before it.
    """
    loop = asyncio.get_running_loop()
    arrived: list[T] = []
    news, ended = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async for item in stream:
                arrived.append(item)
                news.set()
        finally:
            ended.set()
            news.set()

    reader = asyncio.create_task(read())
    # A failure that nobody waits for any more is looked at here, or asyncio complains.
    reader.add_done_callback(lambda task: task.cancelled() or task.exception())
    due_s = -math.inf
    try:
        while not (ended.is_set() and not arrived):
            await news.wait()
            wait_s = due_s - loop.time()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), wait_s)
            news.clear()
            items = arrived.copy()
            arrived.clear()
            if items:
                due_s = loop.time() + interval_s
                yield items
        await reader
    finally:
        reader.cancel()
