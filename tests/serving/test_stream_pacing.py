"""How streams are handed on; the real path is in the HTTP tests."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def delta(token: int, is_last: bool) -> Any:
    """One step's output of a request, as vLLM's output processor makes it."""
    from vllm.outputs import CompletionOutput, RequestOutput

    output = CompletionOutput(
        index=0,
        text=str(token),
        token_ids=[token],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length" if is_last else None,
    )
    return RequestOutput("r", None, [0], None, [output], finished=is_last)


async def collect(gaps_s: Gaps, interval_s: float, error: Exception | None) -> Any:
    from vllm.sampling_params import RequestOutputKind

    from serving.front.stream_pacing import PacedCollector

    collector = PacedCollector(RequestOutputKind.DELTA, "r", interval_s=interval_s)

    async def produce() -> None:
        for token, gap_s in enumerate(gaps_s):
            await asyncio.sleep(gap_s)
            collector.put(delta(token, error is None and token == len(gaps_s) - 1))
        if error is not None:
            await asyncio.sleep(interval_s / 2)
            collector.put(error)

    given = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        finished = False
        while not finished:
            # As `AsyncLLM.generate` reads.
            output = collector.get_nowait() or await collector.get()
            finished = output.finished
            tokens = list(output.outputs[0].token_ids)
            assert output.outputs[0].text == "".join(map(str, tokens))
            given.append((asyncio.get_running_loop().time(), tokens))
    return given


def collect_now(
    gaps_s: Gaps, interval_s: float, error: Exception | None = None
) -> tuple[list[float], list[list[int]]]:
    """Return when outputs were given, and their tokens.

    One token comes after each gap, and after the last one the error, if any.
    """
    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        given = runner.run(collect(gaps_s, interval_s, error))
    return [at_s for at_s, _ in given], [tokens for _, tokens in given]


def test_quick_outputs_keep_their_distance_and_slow_ones_are_not_held_back():
    times, _ = collect_now([INTERVAL_S / 8] * 40, INTERVAL_S)
    apart = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) > 3
    assert min(apart[:-1]) >= 0.95 * INTERVAL_S
    for interval_s in (0.0, 0.01):
        times, tokens = collect_now([0.05] * 6, interval_s)
        assert tokens == [[n] for n in range(6)]
        assert times == pytest.approx([0.05 * n for n in range(1, 7)])


def test_a_failure_goes_out_at_once():
    with pytest.raises(ExceptionGroup) as caught:
        collect_now([0.0], 1000.0, RuntimeError("engine died"))
    assert "engine died" in str(caught.value.exceptions)


async def leave_and_come_back() -> None:
    from vllm.sampling_params import RequestOutputKind

    from serving.front.stream_pacing import PacedCollector

    loop = asyncio.get_running_loop()
    collector = PacedCollector(RequestOutputKind.DELTA, "r", interval_s=1.0)
    collector.put(delta(0, is_last=False))
    await collector.get()
    collector.put(delta(1, is_last=False))
    for wait_s in (0.3, 0.7):
        # The second one leaves in the very moment in which its output may go.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(wait_s):
                await collector.get()
    output = await collector.get()
    assert output.outputs[0].token_ids == [1]
    assert loop.time() == pytest.approx(1.0)
    collector.put(delta(2, is_last=False))
    collector.close()
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


def test_a_reader_that_leaves_loses_no_output_and_leaves_no_timer_behind():
    with asyncio.Runner(loop_factory=MadeUpClockLoop) as runner:
        runner.run(leave_and_come_back())


@given(
    st.lists(st.floats(0.0, 2 * INTERVAL_S), min_size=1, max_size=12),
    st.floats(0.0, 2 * INTERVAL_S),
)
def test_whatever_the_pace_every_token_comes_once_the_first_and_the_last_at_once(
    gaps_s, interval_s
):
    times, tokens = collect_now(gaps_s, interval_s)
    assert list(itertools.chain(*tokens)) == list(range(len(gaps_s)))
    assert times[0] == pytest.approx(gaps_s[0], abs=1e-6)
    assert times[-1] == pytest.approx(sum(gaps_s), abs=1e-6)
