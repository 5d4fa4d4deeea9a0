"""How many requests are let in, and how many KV blocks are kept free for the others."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from policies.decisions.batch_value import ClassLoad
from policies.decisions.batching import BatchPlan
from serving.engine.shared.batch_limits import (
    PRIOR_OUTPUT_TOKENS,
    BatchLimits,
    foresee_growth,
)

BLOCK = 16
MAX_TOKENS = 512
NO_LIMIT = BatchPlan(max_running=64, max_prefill_tokens=MAX_TOKENS, reserved_blocks=0)


def make_request(
    num_prompt, num_output=0, *, num_computed=None, max_tokens=100, status="RUNNING"
):
    num_tokens = num_prompt + num_output
    is_chunk = num_computed is not None
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_output_tokens=num_output,
        num_computed_tokens=num_computed if is_chunk else num_tokens - 1,
        num_output_placeholders=0,
        spec_token_ids=[],
        is_prefill_chunk=is_chunk,
        max_tokens=max_tokens,
        status=SimpleNamespace(name=status),
    )


def make_scheduler(running, waiting, *, num_free, num_blocks=1000, threshold=0):
    pool = {"num_gpu_blocks": num_blocks, "get_num_free_blocks": lambda: num_free}
    cache = {"watermark_blocks": 2, "block_pool": SimpleNamespace(**pool)}
    return SimpleNamespace(
        running=running,
        waiting=waiting,
        num_waiting_for_streaming_input=0,
        max_num_active_reqs=64,
        max_num_scheduled_tokens=MAX_TOKENS,
        num_lookahead_tokens=0,
        num_spec_tokens=0,
        block_size=BLOCK,
        kv_cache_manager=SimpleNamespace(**cache),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=threshold),
    )


def limit(scheduler, plan=NO_LIMIT, ended=()):
    limits = BatchLimits(scheduler)
    for request in ended:
        limits.note_finished(request)
    limits.apply(plan, limits.measure_load())
    return limits


def count_coming(scheduler):
    return scheduler.max_num_active_reqs - len(scheduler.running)


@pytest.mark.parametrize(
    "under_way",
    [
        # 12 of 20 blocks of its prompt are still to come, and no output to speak of.
        make_request(320, num_computed=128, max_tokens=1),
        # Preempted, it is computed again with its output.
        make_request(100, 220, num_computed=128, max_tokens=221),
    ],
)
def test_the_rest_of_what_is_under_way_is_kept_free_in_full(under_way):
    waiting = [make_request(320, max_tokens=1)]
    scheduler = make_scheduler([under_way], waiting, num_free=30)
    limit(scheduler)
    # vLLM's own check alone, 20 of 30 free, would let the second one in.
    assert scheduler.kv_cache_manager.watermark_blocks >= 12


def test_a_long_prompt_that_others_overtook_leaves_them_their_tokens():
    """With this setting alone vLLM lets them in while a long one is under way."""
    prompt, others = make_request(2000, num_computed=64), [make_request(9, 3)] * 2
    scheduler = make_scheduler([prompt, *others], [], num_free=500, threshold=64)
    limit(scheduler)
    assert scheduler.running == [*others, prompt]


def test_the_load_counts_prompts_and_outputs_still_to_come():
    running = [
        make_request(320, num_computed=128, max_tokens=10),
        make_request(50, 30, max_tokens=100),
    ]
    classes = (ClassLoad(30.0, 4.0, 2),)
    limits = BatchLimits(make_scheduler(running, [], num_free=9))
    load = limits.measure_load(40.0, classes)
    np.testing.assert_array_equal(load.tokens_to_grow, [192 + 10, 70])
    assert load.num_decode_tokens == 1
    assert load.num_context_tokens == 128 + 79
    assert load.latency_target_ms == 40.0
    assert load.classes == classes


def test_a_long_default_of_max_tokens_throttles_nobody_and_lengths_are_learnt():
    waiting = [make_request(16, max_tokens=32_000) for _ in range(60)]
    # Of 256 tokens each, 1 + 16 blocks, 32 fit; of 32,000 each not even one would.
    num_free = 32 * (1 + PRIOR_OUTPUT_TOKENS // BLOCK)
    scheduler = make_scheduler([], waiting[:40], num_free=num_free)
    limit(scheduler)
    assert count_coming(scheduler) == 32
    ended = [make_request(16, 16, status="FINISHED_STOPPED") for _ in range(200)]
    scheduler = make_scheduler([], waiting, num_free=num_free)
    limit(scheduler, ended=ended)
    # 512 tokens a step are 32 prompts of 16.
    assert count_coming(scheduler) == 32
    assert scheduler.kv_cache_manager.watermark_blocks < 32 * 3


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_requests_that_were_cut_off_say_nothing_about_lengths(status):
    ended = [make_request(16, 0, status=status) for _ in range(200)]
    scheduler = make_scheduler([], [], num_free=99)
    limits = limit(scheduler, ended=ended)
    scheduler.running.append(make_request(16, 6, max_tokens=32_000))
    [growth] = limits.measure_load().tokens_to_grow
    assert growth == PRIOR_OUTPUT_TOKENS - 6


def test_the_plans_limits_hold_too():
    plan = BatchPlan(max_running=3, max_prefill_tokens=40, reserved_blocks=50)
    running = [make_request(32, 10) for _ in range(2)]
    waiting = [make_request(16) for _ in range(5)]
    scheduler = make_scheduler(running, waiting, num_free=900)
    limits = limit(scheduler, plan)
    assert scheduler.max_num_active_reqs == 3
    assert scheduler.max_num_scheduled_tokens == 2 + 40
    assert scheduler.kv_cache_manager.watermark_blocks >= 50
    limits.lift()
    assert scheduler.max_num_active_reqs == 64
    assert scheduler.max_num_scheduled_tokens == MAX_TOKENS
    assert scheduler.kv_cache_manager.watermark_blocks == 2


def replay_growth(held, growth):
    """Let requests grow token by token, and count blocks."""
    steps = np.arange(growth.max() + 1)[:, None]
    blocks = -(-(held + steps) // BLOCK) * (growth >= steps)
    return max(0, int((blocks.sum(axis=1) - blocks[0].sum()).max()))


def test_what_will_be_needed_is_what_a_replay_finds():
    rng = np.random.default_rng(0)
    for num_reqs, longest in product((1, 2, 5, 12), (1, 20, 200)):
        held = rng.integers(1, 100, num_reqs)
        growth = rng.integers(0, longest + 1, num_reqs)
        assert foresee_growth(held, growth, BLOCK) == replay_growth(held, growth)
    # Of many different ends a few are looked at, and none is missed: three end between
    # two marks, and hold up to 25 blocks each.
    for _ in range(20):
        held, growth = rng.integers(1, 400, 100), rng.integers(0, 400, 100)
        exact = replay_growth(held, growth)
        assert exact <= foresee_growth(held, growth, BLOCK) <= exact + 3 * 25
    nobody = np.empty(0, dtype=np.int64)
    assert foresee_growth(nobody, nobody, BLOCK) == 0
