"""What prompts will bring into a step is known before the step is scheduled."""

import pytest

from serving.engine.shared.coming_prompts import count_coming_prompt_tokens
from tests.engine.checks import complete, draw_prompt, greedy
from tests.engine.conftest import run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHARED = draw_prompt(99, 70)
"""Two KV blocks of it are cached once one request has computed them."""


def test_the_prompts_of_a_step_are_foreseen(tiny_pair):
    """More requests than may run, some with a beginning that is cached."""
    prompts = [
        (SHARED if n % 3 == 0 else []) + draw_prompt(n, 9 + n) for n in range(20)
    ]
    foreseen = []
    brought = []
    with run_engine(
        *tiny_pair, policy="tetris", max_num_seqs=4, block_size=32
    ) as engine:
        scheduler = engine.scheduler
        complete(engine, [SHARED], [greedy(4)])
        schedule = scheduler.schedule

        def spy_on_schedule(*args):
            foreseen.append(count_coming_prompt_tokens(scheduler))
            output = schedule(*args)
            brought.append(
                sum(
                    output.num_scheduled_tokens[new.req_id]
                    for new in output.scheduled_new_reqs
                )
            )
            return output

        scheduler.schedule = spy_on_schedule
        complete(engine, prompts, [greedy(5 + n) for n in range(20)])
    assert sum(map(bool, brought)) >= 8
    assert foreseen == brought
    # Of those that begin alike only the rest was computed.
    assert sum(brought) == sum(map(len, prompts)) - 7 * 64


def test_no_more_is_foreseen_than_a_step_can_carry(tiny_pair):
    largest = 0
    with run_engine(
        *tiny_pair, policy="goodput", max_num_seqs=4, max_num_batched_tokens=64
    ) as engine:
        scheduler = engine.scheduler
        schedule = scheduler.schedule

        def spy_on_schedule(*args):
            nonlocal largest
            largest = max(largest, count_coming_prompt_tokens(scheduler))
            return schedule(*args)

        scheduler.schedule = spy_on_schedule
        complete(engine, [draw_prompt(n, 100) for n in range(6)], [greedy(4)] * 6)
    assert largest == 64
