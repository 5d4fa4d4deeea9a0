"""When an engine counts as hung; a real one is in test_failover."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from serving.replica.options import ReplicaOptions
from serving.replica.watchdog import EngineWatch
from serving.settings.live import read_live
from tests.serving.test_stream_pacing import MadeUpClockLoop

HANG_S, LOAD_S = 20.0, 600.0
OPTIONS = ReplicaOptions(
    device="cpu",
    policy_name="none yet",
    max_depth=4,
    has_snapshots=True,
    planner_key="",
    hang_timeout_s=HANG_S,
    load_timeout_s=LOAD_S,
    board_text=False,
    build=0,
)


class FakeEngine:
    """Answers until it is told to be silent for some seconds."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self.num_asked = 0

    async def answer(self) -> None:
        self.num_asked += 1
        await asyncio.sleep(self.silent_s)
        if self.silent_s:
            raise RuntimeError("an answer that does not matter")


def watch(silent_s: float, *, loading: bool = False) -> float:
    """Return when an engine that falls silent counts as hung; inf for never.

    One that loads does so once, and then answers at once again.
    """

    async def follow() -> float:
        engine, watch = FakeEngine(), EngineWatch(HANG_S, LOAD_S)
        loop = asyncio.get_running_loop()
        following = asyncio.create_task(watch.wait_until_hung(engine.answer))
        await asyncio.sleep(100)
        assert engine.num_asked > 10
        engine.silent_s = silent_s
        began_s = loop.time()
        if loading:
            with watch.loading():
                await asyncio.sleep(5)
                engine.silent_s = 0
                await asyncio.wait({following}, timeout=LOAD_S)
        await asyncio.wait({following}, timeout=3600)
        if not following.done():
            following.cancel()
            return math.inf
        assert following.result() >= HANG_S
        return loop.time() - began_s

    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        return runner.run(follow())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("silent_s", "loading", "hung_s"),
    [
        (HANG_S - 2, False, math.inf),
        (1e6, False, HANG_S),
        # One that loads gets longer.
        (LOAD_S - 8, True, math.inf),
        (1e6, True, LOAD_S),
    ],
)
def test_an_engine_that_does_not_answer_in_time_is_found_out(silent_s, loading, hung_s):
    assert hung_s <= watch(silent_s, loading=loading) <= hung_s + 3


@pytest.mark.faults
def test_time_in_which_the_watcher_itself_stood_still_does_not_count():
    async def follow() -> bool:
        engine, watch = FakeEngine(), EngineWatch(2.0, 2.0)
        engine.silent_s = 0.1
        following = asyncio.create_task(watch.wait_until_hung(engine.answer))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop._now_s += 3.0
        await asyncio.sleep(0.5)
        return following.done()

    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        assert runner.run(follow()) is False


@pytest.mark.faults
def test_an_engine_that_compiles_another_policy_is_not_hung():
    from serving.replica.server import EngineServer

    taken: list[str] = []

    async def follow() -> bool:
        engine, watch = FakeEngine(), EngineWatch(HANG_S, LOAD_S)

        async def change_policy(section: dict[str, Any]) -> None:
            engine.silent_s = 2 * HANG_S + 0.5
            await asyncio.sleep(2 * HANG_S)
            engine.silent_s = 0

        async def go_on(key: str) -> None:
            assert "'policy': 'fixed'" in key

        engine.change_policy = change_policy
        # A stand-in: Ray's class would end an engine with it.
        server = SimpleNamespace(
            engine=engine,
            _watch=watch,
            _metrics=SimpleNamespace(note_policy=taken.append),
            _options=OPTIONS,
            _started_with=OPTIONS,
            _warm_start=SimpleNamespace(go_on=go_on),
        )
        following = asyncio.create_task(watch.wait_until_hung(engine.answer))
        await asyncio.sleep(10)
        live = read_live({"policy": {"name": "fixed", "draft_tokens": 2}})
        await EngineServer._take_settings(server, live)
        await asyncio.sleep(2 * HANG_S)
        return following.done()

    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        assert runner.run(follow()) is False
    assert taken == ["fixed"]


@pytest.mark.faults
@pytest.mark.parametrize("silent_s", [0.0, 1e6])
def test_the_board_hears_of_an_engine_that_does_not_answer(silent_s, monkeypatch):
    from serving.front.app import _BOARD_TIMEOUT_S
    from serving.replica import server

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(server.serve, "get_replica_context", lambda: context)

    async def watch_board(after: int, *, with_text: bool) -> dict[str, Any]:
        assert (after, with_text) == (7, False)
        await asyncio.sleep(silent_s)
        return {"steps": []}

    # A stand-in, as above.
    replica = SimpleNamespace(
        engine=SimpleNamespace(watch_board=watch_board), _options=OPTIONS
    )

    async def ask() -> dict[str, Any]:
        # A front waits as long for all replicas together.
        async with asyncio.timeout(_BOARD_TIMEOUT_S - 1):
            return await server.EngineServer.watch_board(replica, {"a": 7})

    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        seen = runner.run(ask())
    answer = {"error": "The engine does not answer."} if silent_s else {"steps": []}
    assert seen == {"replica": "a", "policy": "none yet", **answer}
