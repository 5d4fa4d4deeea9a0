"""Depth 0: no drafter, no rejection sampling, no planning, and nothing lost by it."""

from itertools import cycle
from unittest.mock import Mock

import pytest

from serving.engine.cpu.drafter_cache import DrafterCache
from serving.engine.cpu.skipped_planning import TELL_ALL, TELL_EVERY
from tests.engine.checks import draw_prompt, draw_prompts, greedy
from tests.engine.conftest import BLOCK, OWN_DEPTH
from tests.engine.made_up import plan_instead

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEPTH = 3


@pytest.fixture
def engine(own_draft):
    return own_draft.start_over("fixed", draft_tokens=DEPTH)


def alternate(num_on, num_off):
    """Draft for some steps, then for some not."""
    return cycle([DEPTH] * num_on + [0] * num_off)


def make_prompts(num_prompts, seed=0):
    return [draw_prompt(seed + n, 4 + 53 * n % 116) for n in range(num_prompts)]


def generate(engine, prompts, max_tokens=80):
    return [tokens for [(tokens, *_)] in engine.answer(prompts, greedy(max_tokens))]


def acceptance_rate(engine):
    counters = engine.counters
    assert counters.num_verified_tokens > 100
    return counters.num_accepted_tokens / counters.num_verified_tokens


@pytest.mark.parametrize(("num_on", "num_off"), [(3, 7), (5, 50)])
def test_steps_without_the_drafter_cost_no_acceptance(plain, engine, num_on, num_off):
    timings = engine.draft_at(alternate(num_on, num_off))
    assert generate(engine, make_prompts(24)) == generate(plain, make_prompts(24))
    assert acceptance_rate(engine) == 1.0
    assert sum(timing.num_backlog for timing in timings) > 250
    assert {timing.draft_first_ms for timing in timings if timing.depth == 0} == {0.0}


def test_without_catching_up_acceptance_would_fall(engine, monkeypatch):
    """The control."""
    cold = "serving.engine.cpu.cold_drafter.ColdDrafter"
    monkeypatch.setattr(f"{cold}._run_pass", lambda *args: None)
    engine.draft_at(alternate(3, 7))
    generate(engine, make_prompts(24))
    assert acceptance_rate(engine) < 0.9


@pytest.mark.parametrize("is_told", [True, False])
def test_a_second_request_that_hits_the_cached_prefix_loses_nothing_either(
    is_told, plain, engine, monkeypatch
):
    """It goes on where the first one, made at depth 0, ended.

    In the control nobody is told that cached blocks lack the drafter's half.
    """
    if not is_told:
        monkeypatch.setattr(DrafterCache, "admit", lambda *_: None)
    depth = 0
    timings = engine.draft_at(iter(lambda: depth, None))
    prompts = [draw_prompt(n, 3 * BLOCK) for n in range(12)]
    first = generate(engine, prompts)
    assert first == generate(plain, prompts)
    num_cold = sum(timing.depth == 0 for timing in timings)
    assert num_cold >= TELL_ALL + (50 - TELL_ALL) // TELL_EVERY
    # Every token but the last of a request could have been followed by a draft.
    num_undrafted = engine.counters.num_cut_tokens["depth"]
    assert num_undrafted == OWN_DEPTH * sum(len(tokens) - 1 for tokens in first)

    depth = DEPTH
    longer = [[*prompt, *own] for prompt, own in zip(prompts, first, strict=True)]
    outputs = engine.complete(longer, greedy(80))
    # All but what fills no block: the first prompts and most of their output.
    assert min(output.num_cached_tokens for output in outputs) >= 5 * BLOCK
    second = [list(output.outputs[0].token_ids) for output in outputs]
    assert second == generate(plain, longer)
    assert acceptance_rate(engine) == 1.0 if is_told else acceptance_rate(engine) < 0.9


def test_a_preempted_request_starts_over_with_a_complete_cache(plain, engine):
    prompts = make_prompts(12, seed=1)
    engine.draft_at(alternate(3, 7))
    with engine.hold_blocks(48), engine.watch() as steps:
        assert generate(engine, prompts, 150) == generate(plain, prompts, 150)
    assert any(step.num_preempted for step in steps)
    assert acceptance_rate(engine) == 1.0


def test_without_drafts_an_engine_answers_like_one_without_a_drafter(plain, engine):
    """And nothing passes the rejection sampler."""
    engine.draft_at(cycle([0]))
    params = [
        greedy(20, logprobs=2),
        greedy(20, repetition_penalty=1.3, min_tokens=5),
        greedy(20, temperature=0.8, top_p=0.9, seed=7),
    ]
    prompts = draw_prompts(len(params))
    engine.complete(prompts, params)  # The first step still has a depth to draft.
    rejections, hook = [], engine.runner.rejection_sampler.register_forward_hook
    with hook(lambda *call: rejections.append(call)):
        answers = engine.answer(prompts, params)
    assert not rejections
    assert answers == plain.answer(prompts, params)


def test_an_engine_skips_planning_between_arrivals_and_ends(plain, engine):
    # Five run, one waits until the first has ended.
    engine.set_policy("fixed", draft_tokens=DEPTH, max_num_seqs=5)
    lengths = [30 + 20 * index for index in range(6)]
    prompts, params = draw_prompts(6), list(map(greedy, lengths))
    choose_none, skipped, timings = Mock(return_value=0), [], []
    scheduler = engine.scheduler
    heard = {"note_skipped_steps": skipped.append, "observe_timing": timings.append}
    plan_instead(scheduler, choose_depth=choose_none, **heard)
    assert engine.answer(prompts, params) == plain.answer(prompts, params)
    # Every step is known of, and in most of them nobody was asked.
    counters, num_asked = scheduler.counters, choose_none.call_count
    num_untold = scheduler._skipping.num_skipped
    assert num_asked + sum(skipped) + num_untold == counters.num_steps
    assert sum(skipped) > num_asked
    assert len(timings) < counters.num_steps / 2
    assert all(timing.depth == 0 for timing in timings)
    # What drafts would have had, but for the last token of each.
    num_undrafted = OWN_DEPTH * (sum(lengths) - len(lengths))
    assert counters.num_cut_tokens["depth"] == num_undrafted

    # Who watches sees every step.
    scheduler.board.watch(0)
    num_skipped_before = sum(skipped) + num_untold
    engine.complete(prompts, params)
    assert sum(skipped) == num_skipped_before
