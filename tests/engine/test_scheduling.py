"""Speculation while the engine is short of tokens per step or of KV blocks.

Where target and draft are the same model every verified draft is right, so that one
rejection means a hole in the drafter's cache.
"""

import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from policies.types import DraftSelection
from serving.engine.shared.counters import SpeculationCounters
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
from tests.engine.made_up import make_up_beliefs, make_up_costs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
"""The smallest KV block of vLLM's CPU attention."""


def test_a_prompt_in_chunks_shares_its_steps_with_drafts(tiny_pair):
    target, _ = tiny_pair
    args = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
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
def test_a_preempted_request_starts_over_with_both_caches(draft, tiny_pair):
    """Six requests of four blocks each share twelve."""
    target = tiny_pair[0]
    args = {
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
        preempted = []
        preempt = scheduler._preempt_request

        def spy_on_preempt(request, *args, **kwargs):
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
        assert counters.num_cut_tokens["kv"] > 0
        if draft == "same":
            assert counters.num_accepted_tokens == counters.num_verified_tokens
        else:
            assert 0 < counters.num_accepted_tokens < counters.num_verified_tokens
    assert summarize_all(outputs) == summarize_all(expected)


SMALL_CACHE = {
    "block_size": BLOCK,
    # One block is vLLM's own.
    "num_gpu_blocks_override": 21,
    "max_model_len": 6 * BLOCK,
    "enable_prefix_caching": False,
    # The longest prompts take three steps.
    "max_num_batched_tokens": 40,
    "max_num_seqs": 8,
}


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_goodput_lets_in_what_fits_and_starves_nobody(policy, tiny_pair):
    """Long prompts in chunks and outputs of up to three blocks, in two priorities."""
    from vllm import SamplingParams

    num_requests = 30
    lengths = {f"{n}": 1 + 29 * n % 100 for n in range(num_requests)}
    priorities = {name: int(name) % 2 for name in lengths}
    first_token_step = {}
    ended = set()
    num_preempted = 0
    with run_engine(
        *tiny_pair, policy=policy, scheduling_policy="priority", **SMALL_CACHE
    ) as engine:
        if policy == "goodput":
            make_up_costs(engine)
        schedule = engine.scheduler.schedule

        def spy_on_schedule(*args):
            nonlocal num_preempted
            output = schedule(*args)
            num_preempted += len(output.preempted_req_ids or ())
            return output

        engine.scheduler.schedule = spy_on_schedule
        llm_engine = engine.llm.llm_engine
        waiting = list(lengths)
        num_side_by_side = Counter()
        for step in range(2000):
            # Three at once, then nobody for two steps: always somebody waits.
            for name in waiting[: 3 if step % 3 == 0 else 0]:
                waiting.remove(name)
                llm_engine.add_request(
                    name,
                    {"prompt_token_ids": draw_prompt(int(name), lengths[name])},
                    SamplingParams(
                        temperature=0,
                        # The default of many clients: says nothing.
                        max_tokens=90 - int(name) if int(name) % 3 else 60,
                        ignore_eos=True,
                        detokenize=False,
                    ),
                    priority=priorities[name],
                )
            for output in llm_engine.step():
                first_token_step.setdefault(output.request_id, step)
                if output.finished:
                    ended.add(output.request_id)
            num_side_by_side[len(engine.scheduler.running)] += 1
            if not waiting and not llm_engine.has_unfinished_requests():
                break
        counters = engine.scheduler.counters
        check_counters(counters)
        check_idle(engine)
    assert ended == set(lengths)
    for priority in (0, 1):
        in_order = [n for n in lengths if priorities[n] == priority]
        steps = [first_token_step[name] for name in in_order]
        assert steps == sorted(steps)
    # Several run at a time all the same.
    assert max(num_side_by_side) >= 3
    # How long outputs get is an estimate: now and then one does not fit after all.
    assert num_preempted <= 2 if policy == "goodput" else num_preempted >= 10


def test_steps_keep_to_sizes_whose_kernels_are_at_hand(tiny_pair):
    """Wherever drafts are left over, also in steps that prompts join."""
    from serving.engine.cpu.step_sizes import CPU_STEP_SIZES

    sizes = Counter()
    num_joined = 0
    with run_engine(
        *tiny_pair, policy="goodput", draft_tokens=4, max_num_seqs=24
    ) as engine:
        make_up_beliefs(engine)
        schedule = engine.scheduler.schedule

        def spy_on_schedule(*args):
            nonlocal num_joined
            num_cut = engine.scheduler.counters.num_cut_tokens
            before = num_cut["budget"]
            output = schedule(*args)
            if num_cut["budget"] > before:
                sizes[output.total_num_scheduled_tokens] += 1
                num_joined += bool(output.scheduled_new_reqs)
            return output

        engine.scheduler.schedule = spy_on_schedule
        prompts = [draw_prompt(n, 15 + n) for n in range(36)]
        complete(engine, prompts, [greedy(10 + 3 * n) for n in range(36)])
    assert sizes.total() >= 10
    assert len(sizes) >= 3
    assert num_joined >= 3
    assert sizes.keys() <= set(CPU_STEP_SIZES)


def time_steps(engine, monkeypatch):
    """Take down the seconds of every step from now on, and those of its planning."""
    times = []
    llm_engine, counters = engine.llm.llm_engine, engine.scheduler.counters
    step = llm_engine.step

    def timed_step():
        began_s, planning_s = time.perf_counter(), counters.planning_seconds_total
        outputs = step()
        step_s = time.perf_counter() - began_s
        times.append((step_s, counters.planning_seconds_total - planning_s))
        return outputs

    monkeypatch.setattr(llm_engine, "step", timed_step)
    return times


def test_planning_is_timed_whole_and_takes_little_of_a_step(tiny_pair, monkeypatch):
    classes = {
        "chat": {"weight": 4.0, "latency_target_ms": 30.0},
        "bulk": {"weight": 0.5},
    }
    params = [
        greedy(40, extra_args={"request_class": ("chat", "bulk")[n % 2]})
        for n in range(64)
    ]
    with run_engine(
        *tiny_pair, policy="goodput", draft_tokens=4, classes=classes, max_num_seqs=64
    ) as engine:
        make_up_costs(engine)
        prompts = [draw_prompt(n, 20) for n in range(64)]
        complete(engine, prompts, params)
        before = engine.scheduler.snapshot()
        times = time_steps(engine, monkeypatch)
        complete(engine, prompts, params)
        after = engine.scheduler.snapshot()
    spent = {
        name: after[name] - before[name]
        for name in ("planning_seconds_total", "selection_seconds_total")
    }
    assert 0 < spent["selection_seconds_total"] < spent["planning_seconds_total"]
    # A stall of the machine falls on few steps.
    num_usual = len(times) * 9 // 10
    assert num_usual > 5
    step_s, planning_s = (np.sort(part)[:num_usual] for part in np.transpose(times))
    # Wanted are 200 us; caches are cold between steps, and slow machines are slow at
    # the rest of a step too.
    assert planning_s.mean() < max(2e-3, step_s.mean() / 10)


def test_cut_tokens_are_counted_by_what_cut_them():
    from serving.engine.cpu.selection import DraftSelector

    def count(**selection):
        counters = SpeculationCounters("goodput", "draft_model", 4)
        requests = [SimpleNamespace(spec_token_ids=[7] * 4) for _ in range(3)]
        admitted = np.array([4, 1, 0])
        DraftSelector._admit(
            SimpleNamespace(_counters=counters),
            requests,
            DraftSelection(admitted, draft_budget=5, **selection),
        )
        assert [len(one.spec_token_ids) for one in requests] == [4, 1, 0]
        return dict(counters.num_cut_tokens)

    assert count() == {"budget": 7}
    assert count(num_cut_by_latency=2) == {"latency": 2, "budget": 5}
    assert count(num_cut_by_latency=9) == {"latency": 7}
    assert count(is_probe=True) == {"probe": 7}
