"""Speculation while an engine is short of tokens per step or of KV blocks.

Target and draft are the same model, so that every verified draft is right: one
rejection means a hole in the drafter's cache.
"""

from collections import Counter
from functools import partial

import pytest

from serving.engine.cpu.step_sizes import CPU_STEP_SIZES
from serving.engine.shared import batch_planning
from serving.engine.shared.coming_prompts import count_coming_prompt_tokens
from tests.engine.checks import MAX_STEPS, draw_prompt, greedy
from tests.engine.conftest import BLOCK, run_engine
from tests.engine.made_up import make_up_beliefs, make_up_costs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEPTH = 4


@pytest.fixture(scope="module")
def start_over(tiny_pair, plain):
    """The engine with a policy, and nothing cached."""
    target, usual = tiny_pair[0], {"draft_tokens": 2, "max_draft_tokens": DEPTH}
    with run_engine(
        target,
        target,
        policy="fixed",
        draft_tokens=DEPTH,
        block_size=BLOCK,
        max_model_len=6 * BLOCK,
        max_num_seqs=24,
        scheduling_policy="priority",
    ) as engine:
        yield lambda policy, **options: engine.start_over(policy, **usual | options)


def spy(engine, monkeypatch, look, before):
    """Show each step's schedule to a function, with what another said before it."""
    schedule = engine.scheduler.schedule

    def spy_on_schedule(*args):
        seen = before()
        output = schedule(*args)
        look(output, seen)
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", spy_on_schedule)


def test_fewer_requests_are_preempted_where_drafts_give_way(start_over, monkeypatch):
    """Requests of many lengths share few blocks; some end before others need one."""
    prompts = [draw_prompt(n, 10 + 7 * n % 60) for n in range(48)]
    params = [greedy(30 + 11 * n % 80) for n in range(48)]

    def run():
        engine = start_over("fixed", draft_tokens=DEPTH, max_num_seqs=12)
        with engine.hold_blocks(24), engine.watch() as steps:
            answers = engine.answer(prompts, params)
        engine.check_counters()
        return answers, sum(step.num_preempted for step in steps), engine.counters

    answers, num_preempted, counters = run()
    monkeypatch.setattr(batch_planning, "trim_to_free_blocks", lambda _: 0)
    expected, num_preempted_without, _ = run()
    assert answers == expected
    assert counters.num_cut_tokens["kv"] > 0
    assert num_preempted < num_preempted_without


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_goodput_lets_in_what_fits_and_starves_nobody(policy, start_over):
    """Long prompts in chunks and outputs of up to three blocks, in two priorities."""
    first_token_step, ended, num_side_by_side = {}, set(), 0
    # The longest prompts take three steps.
    engine = start_over(policy, max_num_batched_tokens=40, max_num_seqs=8)
    if policy == "goodput":
        make_up_costs(engine)
    llm_engine = engine.llm.llm_engine
    waiting, step = list(range(30)), 0
    with engine.hold_blocks(20), engine.watch() as steps:
        while waiting or llm_engine.has_unfinished_requests():
            # Three at once, then nobody for two steps: always somebody waits.
            for n in waiting[: 3 if step % 3 == 0 else 0]:
                waiting.remove(n)
                tokens = {"prompt_token_ids": draw_prompt(n, 1 + 29 * n % 100)}
                params = greedy(90 - n if n % 3 else 60)
                llm_engine.add_request(f"{n}", tokens, params, priority=n % 2)
            for output in llm_engine.step():
                first_token_step.setdefault(int(output.request_id), step)
                if output.finished:
                    ended.add(int(output.request_id))
            num_side_by_side = max(num_side_by_side, len(engine.scheduler.running))
            step += 1
            assert step < MAX_STEPS
    engine.check_counters()
    engine.check_idle()
    assert ended == set(range(30))
    for priority in (0, 1):
        first_steps = [first_token_step[n] for n in range(priority, 30, 2)]
        assert first_steps == sorted(first_steps)
    # Several run at a time all the same.
    assert num_side_by_side >= 3
    # How long outputs get is an estimate: now and then one does not fit after all.
    num = sum(one.num_preempted for one in steps)
    assert num <= 2 if policy == "goodput" else num >= 10, num


def test_steps_keep_to_sizes_whose_kernels_are_at_hand(start_over, monkeypatch):
    """Wherever drafts are left over, also in steps that prompts join."""
    engine = start_over("goodput")
    make_up_beliefs(engine)
    num_cut = engine.counters.num_cut_tokens
    sizes, num_joined = Counter(), 0

    def look(output, num_cut_before):
        nonlocal num_joined
        if num_cut["budget"] > num_cut_before:
            sizes[output.total_num_scheduled_tokens] += 1
            num_joined += bool(output.scheduled_new_reqs)

    spy(engine, monkeypatch, look, lambda: num_cut["budget"])
    prompts = [draw_prompt(n, 15 + n) for n in range(36)]
    engine.complete(prompts, [greedy(10 + 3 * n) for n in range(36)])
    assert sizes.total() >= 10
    assert len(sizes) >= 3
    assert num_joined >= 3
    assert sizes.keys() <= set(CPU_STEP_SIZES)


def test_the_prompts_of_a_step_are_foreseen(start_over, monkeypatch):
    """More requests than may run, some with a beginning that is cached."""
    # Two KV blocks of it are cached once one request has computed them.
    shared = draw_prompt(99, 70)
    begins = [shared if n % 3 == 0 else [] for n in range(20)]
    prompts = [begin + draw_prompt(n, 9 + n) for n, begin in enumerate(begins)]
    engine = start_over("tetris", max_num_seqs=4)
    engine.complete([shared], greedy(4))
    steps = []

    def look(output, num_foreseen):
        new = [one.req_id for one in output.scheduled_new_reqs]
        num_brought = sum(output.num_scheduled_tokens[req_id] for req_id in new)
        steps.append((num_foreseen, num_brought))

    foresee = partial(count_coming_prompt_tokens, engine.scheduler)
    spy(engine, monkeypatch, look, foresee)
    engine.complete(prompts, [greedy(5 + n) for n in range(20)])
    foreseen, brought = zip(*steps, strict=True)
    assert sum(map(bool, brought)) >= 8
    assert foreseen == brought
    # Of those that begin alike only the rest was computed.
    assert sum(brought) == sum(map(len, prompts)) - 7 * 64

    # No more is foreseen than a step can carry.
    start_over("tetris", max_num_seqs=4, max_num_batched_tokens=64)
    steps.clear()
    engine.complete([draw_prompt(n, 100) for n in range(6)], greedy(4))
    assert max(num_foreseen for num_foreseen, _ in steps) == 64
