"""The live board: one feed of engine steps, shared by everybody who watches."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    Ask = Callable[[Mapping[str, int]], Awaitable[list[dict[str, Any]]]]

logger = logging.getLogger("ray.serve")

PERIOD_S: Final = 0.4
"""Time between two looks at the replicas, however many people watch."""

MAX_WATCHERS: Final = 32

PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
}
STREAM_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

_QUEUE_LENGTH: Final = 4


def read_page(name: str) -> str:
    """Return a page with its script in it, after what both pages share.

    Args:
        name: `board` or `chat`.
    """
    folder = Path(__file__).parent
    page, shared, own = (
        (folder / file).read_text("utf-8")
        for file in (f"{name}.html", "page.js", f"{name}.js")
    )
    return page.replace("<script></script>", f"<script>\n{shared}{own}</script>")


class TooManyWatchersError(Exception):
    """The board has as many watchers as it takes."""


class BoardFeed:
    """Asks the replicas while anybody watches, and tells every watcher the same.

    A watcher that cannot keep up misses events; nobody waits for it.
    """

    def __init__(self, ask: Ask, period_s: float = PERIOD_S) -> None:
        """Prepare a feed.

        Args:
            ask: Takes the last step seen by replica; returns what the replicas'
                `watch_board` gave.
            period_s: Time between two questions.
        """
        self._ask = ask
        self._period_s = period_s
        self._queues: set[asyncio.Queue[str]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._seen: dict[str, int] = {}

    def watch(self) -> AsyncGenerator[str, None]:
        """Return server-sent events until the watcher leaves.

        Raises:
            TooManyWatchersError: `MAX_WATCHERS` watch already.
        """
        if len(self._queues) >= MAX_WATCHERS:
            raise TooManyWatchersError(f"the board has {MAX_WATCHERS} watchers already")
        return self._events()

    async def _events(self) -> AsyncGenerator[str, None]:
        queue: asyncio.Queue[str] = asyncio.Queue(_QUEUE_LENGTH)
        self._queues.add(queue)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._keep_asking())
        try:
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)

    async def _keep_asking(self) -> None:
        while self._queues:
            try:
                event = json.dumps({"replicas": await self._look()})
            except Exception as error:
                logger.warning("The board is blind for a moment: %r", error)
                event = json.dumps({"error": "The replicas do not answer."})
            for queue in list(self._queues):
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(f"data: {event}\n\n")
            await asyncio.sleep(self._period_s)

    async def _look(self) -> list[dict[str, Any]]:
        replicas = await self._ask(self._seen)
        # A step number that falls is a recording that began anew.
        self._seen = {
            one["replica"]: one["totals"]["steps"]
            if one.get("totals")
            else self._seen.get(one["replica"], 0)
            for one in replicas
        }
        return sorted(replicas, key=lambda one: str(one["replica"]))
