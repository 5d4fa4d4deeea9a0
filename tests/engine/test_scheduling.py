"""Speculation while the engine is short of tokens per step or of KV blocks.

Where target and draft are the same model every verified draft is right, so that one
rejection means a hole in the drafter's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.checks import (
    Arrival,
    check_counters,
    check_idle,
    complete,
    draw_prompt,
    drive,
    greedy,
    summarize,
    summarize_all,
    watch,
)
from tests.engine.conftest import run_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
"""The smallest KV block of vLLM's CPU attention."""


def test_a_prompt_in_chunks_shares_its_steps_with_drafts(
    tiny_pair: tuple[Path, Path],
) -> None:
    target, _ = tiny_pair
    args: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
    arrivals = [
        Arrival("early0", draw_prompt(0, 6), greedy(40)),
        Arrival("early1", draw_prompt(1, 9), greedy(40)),
        Arrival("long", draw_prompt(2, 150), greedy(20), step=3),
        Arrival("late", draw_prompt(3, 70), greedy(20), step=5),
    ]
    with run_engine(target, **args) as plain:
        expected = drive(plain, arrivals)
    with (
        run_engine(target, target, policy="tetris", **args) as engine,
        watch(engine) as steps,
    ):
        outputs = drive(engine, arrivals)
        counters = engine.scheduler.counters
        check_counters(counters)
        check_idle(engine)
        assert counters.num_accepted_tokens == counters.num_verified_tokens > 0
    for name, output in expected.items():
        assert summarize(outputs[name].outputs[0]) == summarize(output.outputs[0])
    shared = [
        step
        for step in steps
        if step.num_scheduled.get("long", 0) > 5 and sum(step.num_drafts.values())
    ]
    # 150 tokens at no more than 40 a step.
    assert len(shared) >= 3
    assert all(sum(step.num_scheduled.values()) <= 40 for step in steps)


@pytest.mark.parametrize("draft", ["same", "noisy"])
def test_a_preempted_request_starts_over_with_both_caches(
    draft: str, tiny_pair: tuple[Path, Path]
) -> None:
    """Six requests of four blocks each share twelve."""
    target = tiny_pair[0]
    args: dict[str, Any] = {
        "block_size": BLOCK,
        "num_gpu_blocks_override": 13,
        "max_model_len": 6 * BLOCK,
        "enable_prefix_caching": False,
    }
    prompts = [draw_prompt(i, 30 + 5 * i) for i in range(6)]
    params = greedy(4 * BLOCK - 56)
    with run_engine(target, **args) as plain:
        expected = complete(plain, prompts, params)
    with run_engine(
        target, target if draft == "same" else tiny_pair[1], policy="tetris", **args
    ) as engine:
        scheduler = engine.scheduler
        preempted: list[tuple[str, int]] = []
        preempt = scheduler._preempt_request

        def spy_on_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append((request.request_id, request.num_output_tokens))
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = spy_on_preempt
        with watch(engine):
            outputs = complete(engine, prompts, params)
        # In mid-generation, not before the first token.
        assert any(num_output_tokens > 5 for _, num_output_tokens in preempted)
        counters = scheduler.counters
        check_counters(counters)
        check_idle(engine)
        assert counters.num_verified_tokens > 0
        if draft == "same":
            assert counters.num_accepted_tokens == counters.num_verified_tokens
        else:
            assert 0 < counters.num_accepted_tokens < counters.num_verified_tokens
    assert summarize_all(outputs) == summarize_all(expected)
