"""How streams are handed on; the real path is in the HTTP tests."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence

import pytest

from serving.replica.stream_pacing import pace

INTERVAL_S = 0.2
Gaps = Sequence[float]


class MadeUpClockLoop(asyncio.SelectorEventLoop):
    """Jumps ahead where it would sleep, so that a busy machine delays nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._look = self._selector.select
        self._selector.select = self._select

    def time(self) -> float:
        return self._now_s

    def _select(self, timeout_s: float | None = None) -> list[object]:
        if timeout_s is None:
            return self._look(None)
        self._now_s += max(0.0, timeout_s)
        return self._look(0)


async def produce(gaps_s: Gaps, ended: list[bool]) -> AsyncGenerator[int, None]:
    """Give a number after each gap, and take down how the stream was left."""
    try:
        for number, gap_s in enumerate(gaps_s):
            if gap_s:
                await asyncio.sleep(gap_s)
            yield number
    finally:
        ended.append(True)


async def collect(gaps_s: Gaps, interval_s: float) -> list[tuple[float, list[int]]]:
    """Return every list with the seconds after which it came."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    stream = pace(produce(gaps_s, []), interval_s)
    return [(loop.time() - began_s, items) async for items in stream]


def collect_now(gaps_s: Gaps, interval_s: float) -> list[tuple[float, list[int]]]:
    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        return runner.run(collect(gaps_s, interval_s))


def test_the_first_and_the_last_go_out_at_once():
    [first, last] = collect_now([0.0, 0.0, INTERVAL_S / 4, 0.0], INTERVAL_S)
    assert first[1] + last[1] == [0, 1, 2, 3]
    assert first[0] < INTERVAL_S / 4
    assert last[0] < INTERVAL_S / 2


def test_in_between_lists_keep_their_distance_and_lose_nothing():
    lists = collect_now([INTERVAL_S / 8] * 40, INTERVAL_S)
    assert [item for _, items in lists for item in items] == list(range(40))
    times = [at_s for at_s, _ in lists]
    apart = [b - a for a, b in itertools.pairwise(times)]
    assert len(lists) > 3
    assert min(apart[:-1]) >= 0.95 * INTERVAL_S


def test_slow_items_are_not_held_back():
    lists = collect_now([0.05] * 6, 0.01)
    assert [items for _, items in lists] == [[n] for n in range(6)]


def test_without_an_interval_everything_goes_out_as_it_comes():
    lists = collect_now([0.01] * 5, 0.0)
    assert [items for _, items in lists] == [[n] for n in range(5)]


def test_an_empty_stream_ends():
    assert collect_now([], INTERVAL_S) == []


def test_a_failure_comes_after_what_came_before_it():
    async def fail() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        raise RuntimeError("engine died")

    got: list[int] = []

    async def read() -> None:
        async for items in pace(fail(), INTERVAL_S):
            got.extend(items)

    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(read())
    assert got == [1, 2]


def test_a_reader_that_leaves_ends_the_source():
    ended: list[bool] = []

    async def read() -> None:
        stream = pace(produce([0.0, 60.0], ended), INTERVAL_S)
        assert await anext(stream) == [0]
        await stream.aclose()
        await asyncio.sleep(0)
        assert ended == [True]

    asyncio.run(read())
