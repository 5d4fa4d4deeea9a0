"""A drafter's cache that went stale in a real engine is found out and filled anew."""

from itertools import chain, repeat

import pytest

from tests.engine.checks import Arrival, draw_prompt, greedy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults]

DEPTH = 3


@pytest.fixture
def engine(own_draft):
    """An engine that has seen enough drafts to know what is usual."""
    own_draft.start_over("fixed", draft_tokens=DEPTH)
    own_draft.drive(make_arrivals(8, 1, prompt_len=30, max_tokens=150))
    assert not own_draft.counters.num_quarantines
    return own_draft


def make_arrivals(num_reqs, seed, *, prompt_len, max_tokens):
    params = greedy(max_tokens)
    prompts = [draw_prompt(100 * seed + n, prompt_len) for n in range(num_reqs)]
    return [Arrival(f"r{n}", prompt, params) for n, prompt in enumerate(prompts)]


def damage_cache(engine):
    """Overwrite all that the drafter has in its KV cache, as if it were stale."""
    import torch

    runner = engine.runner
    context = runner.vllm_config.compilation_config.static_forward_context
    for name in runner.drafter._draft_attn_layer_names:
        cache = context[name].kv_cache
        for part in cache if isinstance(cache, (list, tuple)) else [cache]:
            part.copy_(10.0 * torch.randn_like(part))


@pytest.mark.parametrize("rebuilds", [True, False])
def test_a_stale_cache_after_a_skip_is_refilled(rebuilds, plain, engine, monkeypatch):
    """In the control nothing fills it, and the same requests stay under quarantine."""
    scheduler = engine.scheduler
    if not rebuilds:
        monkeypatch.setattr(type(scheduler._watchdog), "take_rebuilds", lambda _: ())
    arrivals = make_arrivals(4, 2, prompt_len=60, max_tokens=440)
    num_before, num_skipped = 40, 20
    depths = chain(repeat(DEPTH, num_before), repeat(0, num_skipped), repeat(DEPTH))
    engine.draft_at(depths)
    schedule, num_calls = scheduler.schedule, 0

    def damage_after_skip(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == num_before + num_skipped + 2:
            damage_cache(engine)
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", damage_after_skip)
    with engine.watch() as steps:
        assert engine.drive(arrivals) == plain.drive(arrivals)
    assert sum(scheduler.counters.num_quarantines.values()) == 1
    late = steps[num_before + num_skipped + 52 :][:20]
    assert all(sum(s.num_drafts.values()) == 4 * DEPTH for s in late) == rebuilds


def test_under_a_new_policy_nothing_is_under_quarantine_any_more(engine):
    scheduler = engine.scheduler
    scheduler.counters.num_quarantined["all"] = 3
    section = {"policy": "fixed", "draft_tokens": DEPTH, "max_draft_tokens": DEPTH}
    scheduler.change_policy(section)
    assert scheduler.snapshot()["num_quarantined"] == {}
