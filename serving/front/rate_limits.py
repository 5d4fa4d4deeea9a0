"""How much a key may ask for: requests and tokens a minute, requests at a time.

Rates are counted in fixed windows of a minute, which begin with a key's first request:
by Redis for all fronts together, or else in each front, which allows its part. What
runs at a time is always counted in each front, for a count in Redis would outlive a
front that dies. Tokens are known, and charged, when a request ends: what runs already
may go beyond the limit, and the next one waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter

from serving.front.errors import ApiError

if TYPE_CHECKING:
    from serving.settings.key_file import KeyEntry

logger = logging.getLogger("ray.serve")

_REDIS_PATIENCE_S: Final = 1.0
_KINDS: Final = ("requests", "tokens")


class RateLimits:
    """Counts what keys use.

    Attributes:
        num_fronts: That share the limits.
    """

    def __init__(self, redis_url: str | None = None) -> None:
        """Count nothing yet; must be made where an event loop runs.

        Args:
            redis_url: Where fronts count together; None where each counts alone.
        """
        self.num_fronts = 1
        self._running: Counter[str] = Counter()
        self._charging: set[asyncio.Task[tuple[int, int, float]]] = set()
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._shared: FixedWindowRateLimiter | None = None
        if redis_url is not None:
            storage = RedisStorage(
                f"async+{redis_url}",
                implementation="redispy",
                key_prefix="tetris",
                socket_timeout=_REDIS_PATIENCE_S,
                socket_connect_timeout=_REDIS_PATIENCE_S,
            )
            self._shared = FixedWindowRateLimiter(storage)

    async def begin(self, name: str, entry: KeyEntry) -> dict[str, str]:
        """Let one request of a key begin, which `end` must follow.

        Args:
            name: The key's.
            entry: Its limits.

        Returns:
            OpenAI's `x-ratelimit-*` headers for the answer.

        Raises:
            ApiError: 429; `end` must not follow.
        """
        limit = entry.max_concurrent
        if limit is not None and self._running[name] >= self._part(limit):
            raise ApiError(
                429, f"The key {name} has {limit} requests running, as many as it may."
            )
        # Before anything is waited for, or more would slip through meanwhile.
        self._running[name] += 1
        try:
            return await self._count(name, entry)
        except BaseException:
            self.end(name)
            raise

    def end(self, name: str) -> None:
        """Note that a request has ended."""
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]

    def charge(self, name: str, entry: KeyEntry, num_tokens: int) -> None:
        """Charge the tokens of a request that has ended, in the background."""
        if entry.tokens_per_minute is None or not num_tokens:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # The front has ended, and its counts with it.
        charging = self._use("tokens", name, entry.tokens_per_minute, num_tokens)
        task = loop.create_task(charging)
        self._charging.add(task)
        task.add_done_callback(self._charging.discard)

    async def _count(self, name: str, entry: KeyEntry) -> dict[str, str]:
        headers: dict[str, str] = {}
        refused: tuple[str, int, float] | None = None
        given = (entry.requests_per_minute, entry.tokens_per_minute)
        for kind, limit in zip(_KINDS, given, strict=True):
            if limit is None:
                continue
            cost = 1 if kind == "requests" else 0
            used, most, reset_s = await self._use(kind, name, limit, cost)
            headers |= {
                f"x-ratelimit-limit-{kind}": str(limit),
                f"x-ratelimit-remaining-{kind}": str(max(0, most - used)),
                f"x-ratelimit-reset-{kind}": f"{math.ceil(reset_s)}s",
            }
            if used - cost >= most:
                refused = kind, limit, reset_s
        if refused is not None:
            kind, limit, reset_s = refused
            error = ApiError(
                429, f"The key {name} has used its {limit} {kind} of this minute."
            )
            error.retry_after_s = max(1, math.ceil(reset_s))
            error.headers = headers
            raise error
        return headers

    async def _use(
        self, kind: str, name: str, limit: int, cost: int
    ) -> tuple[int, int, float]:
        """Add to what was used; return that, the limit here, and seconds to the end."""
        if self._shared is not None:
            try:
                return await _add(self._shared, kind, name, limit, cost)
            except Exception as error:
                logger.warning("Redis does not count; this front does: %r", error)
        return await _add(self._own, kind, name, self._part(limit), cost)

    def _part(self, limit: int) -> int:
        return -(-limit // self.num_fronts)


async def _add(
    limiter: FixedWindowRateLimiter, kind: str, name: str, limit: int, cost: int
) -> tuple[int, int, float]:
    # Another limit is the same count; `limits` would begin a new one.
    item = RateLimitItemPerMinute(1)
    key = item.key_for(kind, name)
    storage = limiter.storage
    if cost:
        used = await storage.incr(key, item.get_expiry(), amount=cost)
    else:
        used = await storage.get(key)
    reset_s = await storage.get_expiry(key) - time.time() if used else 0.0
    return used, limit, max(0.0, reset_s)
