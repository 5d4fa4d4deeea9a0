"""What keys use, counted in each front, or in a Redis that lives, hangs, or is gone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from serving.front.errors import ApiError
from serving.front.rate_limits import RateLimits
from serving.settings.key_file import KeyEntry, hash_key

pytestmark = pytest.mark.anyio

# A Redis made of Python: the protocol over TCP, and the Lua that `limits` counts with.
REDIS = """
from fakeredis import TcpFakeServer
server = TcpFakeServer(("127.0.0.1", 0))
print(server.server_address[1], flush=True)
server.serve_forever()
"""
NOBODY_LISTENS = "redis://127.0.0.1:1/0"


@pytest.fixture
def redis() -> Iterator[Any]:
    program = [sys.executable, "-W", "ignore", "-c", REDIS]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        url = f"redis://127.0.0.1:{port}/0"
        yield SimpleNamespace(process=process, url=url)
        process.kill()


class Front:
    """The counts of one of two fronts, by a clock that is set."""

    def __init__(self, redis_url: str | None = None) -> None:
        self.now_s = 0.0
        self.alone: list[str] = []
        self.limits = RateLimits(redis_url, lambda: self.now_s, self.alone.append)
        self.limits.num_fronts = 2

    async def close(self) -> None:
        """Leave no connection to be found while some other test runs."""
        if self.limits._redis is not None:
            await self.limits._redis.bridge.storage.connection_pool.disconnect()

    async def count_allowed(self, num_tries: int, **limits: int) -> int:
        """Send short requests of one key; return how many were let in."""
        entry, num_allowed = KeyEntry(sha256=hash_key("x"), **limits), 0
        for _ in range(num_tries):
            with contextlib.suppress(ApiError):
                await self.limits.begin("ann", entry)
                num_allowed += 1
                self.limits.end("ann")
        return num_allowed


@pytest.fixture
async def start_front() -> AsyncIterator[Callable[..., Front]]:
    fronts: list[Front] = []

    def start(redis_url: str | None = None) -> Front:
        fronts.append(Front(redis_url))
        return fronts[-1]

    yield start
    for front in fronts:
        await front.close()


async def test_fronts_divide_what_a_key_may_have_running():
    entry = KeyEntry(sha256=hash_key("x"), max_concurrent=4)
    limits = Front().limits
    await limits.begin("ann", entry)
    await limits.begin("ann", entry)
    with pytest.raises(ApiError, match="4 requests running"):
        await limits.begin("ann", entry)
    limits.end("ann")
    await limits.begin("ann", entry)


async def test_fronts_that_share_a_redis_allow_together_what_one_would(
    redis, start_front
):
    first, second = start_front(redis.url), start_front(redis.url)
    assert await first.count_allowed(4, requests_per_minute=5) == 4
    assert await second.count_allowed(3, requests_per_minute=5) == 1
    assert await first.count_allowed(1, requests_per_minute=5) == 0
    # Tokens that one front charges the other knows of.
    entry = KeyEntry(sha256=hash_key("x"), tokens_per_minute=100)
    assert await second.count_allowed(1, tokens_per_minute=100) == 1
    first.limits.charge("ann", entry, 60)
    first.limits.charge("ann", entry, 60)
    for task in list(first.limits._charging):
        await task
    assert await second.count_allowed(1, tokens_per_minute=100) == 0


@pytest.mark.faults
async def test_a_redis_that_dies_leaves_each_front_its_part(
    redis, serve_log, start_front
):
    front = start_front(redis.url)
    assert await front.count_allowed(3, requests_per_minute=4) == 3
    assert front.alone == []
    redis.process.kill()
    redis.process.wait()
    began_s = time.monotonic()
    assert await front.count_allowed(5, requests_per_minute=4) == 2
    assert front.alone == 5 * ["requests"]
    assert time.monotonic() - began_s < 1.0
    assert len(serve_log.messages) == 1
    assert "this front does for 10 s" in serve_log.messages[0]
    front.now_s = 11.0
    await front.count_allowed(2, requests_per_minute=4)
    assert len(serve_log.messages) == 2


@pytest.mark.faults
async def test_a_redis_that_hangs_is_waited_for_once_and_counts_again_later(
    redis, serve_log, start_front
):
    front, other = start_front(redis.url), start_front(redis.url)
    assert await front.count_allowed(3, requests_per_minute=4) == 3
    redis.process.send_signal(signal.SIGSTOP)
    # Until it stands still it may answer once more.
    os.waitpid(redis.process.pid, os.WUNTRACED)
    began_s = time.monotonic()
    assert await front.count_allowed(5, requests_per_minute=4) == 2
    assert 1.0 < time.monotonic() - began_s < 10.0
    assert len(serve_log.messages) == 1
    redis.process.send_signal(signal.SIGCONT)
    front.now_s = 11.0
    num_allowed = await front.count_allowed(2, requests_per_minute=4)
    # What was sent before it hung may count too.
    assert num_allowed <= 1
    assert await other.count_allowed(1, requests_per_minute=4) == 0
    assert len(serve_log.messages) == 1


@pytest.mark.faults
@pytest.mark.parametrize(
    "url", [NOBODY_LISTENS, "redis://redis.invalid:6379/0"], ids=["away", "no name"]
)
async def test_without_redis_each_front_counts_alone(url, serve_log, start_front):
    front = start_front(url)
    began_s = time.monotonic()
    assert await front.count_allowed(3, requests_per_minute=4) == 2
    assert time.monotonic() - began_s < 10.0
    assert len(serve_log.messages) == 1


@pytest.mark.faults
async def test_a_minute_lasts_a_minute_whatever_the_wall_clock_is_set_to(monkeypatch):
    front = Front()
    assert await front.count_allowed(2, requests_per_minute=2) == 1
    assert front.alone == []
    monkeypatch.setattr(time, "time", lambda: 0.0)
    front.now_s = 59.0
    assert await front.count_allowed(2, requests_per_minute=2) == 0
    front.now_s = 60.0
    assert await front.count_allowed(2, requests_per_minute=2) == 1
