"""An engine that hangs is told from one that is slow."""

import asyncio

from serving.replica.watchdog import wait_until_hung


def test_an_engine_that_does_not_answer_hangs() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(wait_until_hung(never, 0.02, 0.01), 5))


def test_a_slow_engine_and_a_failing_question_are_no_hang() -> None:
    num_asked = 0

    async def slow_or_failing() -> None:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0.005)
        if num_asked % 2:
            raise RuntimeError("not now")

    async def main() -> None:
        watching = asyncio.create_task(wait_until_hung(slow_or_failing, 1.0, 0.001))
        await asyncio.sleep(0.2)
        assert not watching.done()
        watching.cancel()

    asyncio.run(main())
    assert num_asked > 4
