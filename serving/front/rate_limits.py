"""How much a key may ask for: requests and tokens a minute, requests at a time.

Rates are counted in fixed windows of a minute, which begin with a key's first request:
by Redis for all fronts together, or else in each front, which allows its part. What
runs at a time is always counted in each front, for a count in Redis would outlive a
front that dies. Tokens are known, and charged, when a request ends: what runs already
may go beyond the limit, and the next one waits.

A Redis that does not answer is left alone for ten seconds, in which each front counts
by itself; the requests that find out wait for it for about two.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from limits.aio.storage import RedisStorage
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from serving.front.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.settings.key_file import KeyEntry

logger = logging.getLogger("ray.serve")

_WINDOW_S: Final = 60
_REDIS_PATIENCE_S: Final = 1.0
_REDIS_TRIES: Final = 2
"""Redis closes connections that nobody uses; the second try opens another."""

_REDIS_PAUSE_S: Final = 10.0
_KINDS: Final = ("requests", "tokens")


class RateLimits:
    """Counts what keys use.

    Attributes:
        num_fronts: That share the limits.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        note_alone: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Count nothing yet; must be made where an event loop runs.

        Args:
            redis_url: Where fronts count together; None where each counts alone.
            clock: Seconds. One that is set back would make a minute last hours.
            note_alone: Told `requests` or `tokens` each time that this front counts
                them by itself although there is a Redis.
        """
        self.num_fronts = 1
        self._clock = clock
        self._note_alone = note_alone
        self._running: Counter[str] = Counter()
        self._charging: set[asyncio.Task[tuple[int, int, float]]] = set()
        self._own = _Windows()
        self._redis: RedisStorage | None = None
        self._ask_redis_at_s = -math.inf
        if redis_url is not None:
            # By default it tries for seconds, at greater and greater intervals. Any:
            # `limits` hands it on, but its types name no objects.
            retry: Any = Retry(NoBackoff(), _REDIS_TRIES - 1)
            self._redis = RedisStorage(
                f"async+{redis_url}",
                implementation="redispy",
                key_prefix="tetris",
                socket_timeout=_REDIS_PATIENCE_S,
                socket_connect_timeout=_REDIS_PATIENCE_S,
                retry=retry,
            )

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
        key, now_s = f"{kind}/{name}", self._clock()
        if self._redis is not None and now_s >= self._ask_redis_at_s:
            try:
                return await _count_together(self._redis, key, limit, cost)
            except Exception as error:
                self._ask_redis_at_s = self._clock() + _REDIS_PAUSE_S
                logger.warning(
                    "Redis does not count; this front does for %.0f s: %r",
                    _REDIS_PAUSE_S,
                    error,
                )
        if self._redis is not None:
            self._note_alone(kind)
        used, reset_s = self._own.add(key, cost, now_s)
        return used, self._part(limit), reset_s

    def _part(self, limit: int) -> int:
        return -(-limit // self.num_fronts)


class _Windows:
    """What one front counts by itself."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._ends_s: dict[str, float] = {}

    def add(self, key: str, cost: int, now_s: float) -> tuple[int, float]:
        """Add to what was used; return that, and seconds to the window's end."""
        if now_s >= self._ends_s.get(key, -math.inf):
            self._used[key], self._ends_s[key] = 0, now_s + _WINDOW_S
        self._used[key] += cost
        return self._used[key], self._ends_s[key] - now_s


async def _count_together(
    redis: RedisStorage, key: str, limit: int, cost: int
) -> tuple[int, int, float]:
    if cost:
        used = await redis.incr(key, _WINDOW_S, amount=cost)
    else:
        used = await redis.get(key)
    if not used:
        return used, limit, 0.0
    ends_s = await redis.get_expiry(key)
    # What `limits` has just added to the seconds that Redis tells.
    return used, limit, max(0.0, ends_s - time.time())  # noqa: TID251
