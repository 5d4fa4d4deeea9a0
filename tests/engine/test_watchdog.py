"""Drafters that break in a real engine: found out, left alone, and taken back."""

import logging
from itertools import chain, repeat
from unittest.mock import patch

import pytest

from tests.engine.checks import FIRST_ORDINARY_TOKEN, Arrival, draw_prompt, greedy
from tests.engine.conftest import BLOCK, run_engine
from tests.engine.tiny_models import VOCAB_SIZE, write_llama_pair

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults]

DEPTH = 3
LIMIT = 512
CLASSES = {"interactive": {"weight": 2.0}, "batch": {}}
LOGGER = "serving.engine.shared.watchdog"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """One that takes more than 512 tokens."""
    folder = tmp_path_factory.mktemp("long_pair")
    return write_llama_pair(folder, noise=0.0, max_position_embeddings=1024)[0]


@pytest.fixture(scope="module")
def alone(target):
    with run_engine(target, max_model_len=1024, block_size=BLOCK) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(alone, target):
    """The target drafts for itself: whatever is rejected, somebody has broken."""
    with run_engine(
        target,
        target,
        policy="fixed",
        draft_tokens=DEPTH,
        classes=CLASSES,
        max_model_len=1024,
        block_size=BLOCK,
    ) as engine:
        yield engine


@pytest.fixture
def engine(drafting):
    """An engine that has seen enough drafts to know what is usual."""
    drafting.start_over("fixed", draft_tokens=DEPTH)
    drafting.drive(make_arrivals("warm", 8, prompt_len=30, max_tokens=150))
    assert not drafting.counters.num_quarantines
    return drafting


def make_arrivals(name, num_reqs, *, prompt_len, max_tokens, request_class="batch"):
    params = greedy(max_tokens, extra_args={"request_class": request_class})
    seed = sum(name.encode())  # The same in every process.
    return [
        Arrival(f"{name}{i}", draw_prompt(seed + i, prompt_len), params)
        for i in range(num_reqs)
    ]


def drive_broken(engine, alone, arrivals, is_broken, caplog):
    """Drive requests; the drafts of some are in some steps other tokens than drawn.

    `is_broken` takes a request and the number of the step.

    Returns:
        The steps, and what is told meanwhile.
    """
    drafter, scheduler = engine.runner.drafter, engine.scheduler
    propose, num_ordinary = drafter.propose, VOCAB_SIZE - FIRST_ORDINARY_TOKEN

    def propose_worse(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        for row, req_id in enumerate(engine.runner.input_batch.req_ids):
            request = scheduler.requests[req_id]
            if is_broken(request, scheduler.counters.num_steps):
                shifted = (drafts[row] + 1 - FIRST_ORDINARY_TOKEN) % num_ordinary
                drafts[row] = shifted + FIRST_ORDINARY_TOKEN
        return drafts

    with (
        patch.object(drafter, "propose", propose_worse),
        caplog.at_level(logging.INFO, logger=LOGGER),
        engine.watch() as steps,
    ):
        assert engine.drive(arrivals) == alone.drive(arrivals)
    return steps, [r.getMessage() for r in caplog.records if r.name == LOGGER]


def find_drafting(steps, prefix):
    """Return, step by step, how many drafts requests of that name had verified."""
    return [
        sum(n for name, n in step.num_drafts.items() if name.startswith(prefix))
        for step in steps
    ]


def test_collapse_past_a_position_is_told_and_left_alone(alone, engine, caplog):
    arrivals = [
        *make_arrivals("long", 3, prompt_len=LIMIT - 60, max_tokens=260),
        *make_arrivals("short", 3, prompt_len=20, max_tokens=480),
    ]

    def is_broken(request, _step):
        return request.num_tokens >= LIMIT

    steps, told = drive_broken(engine, alone, arrivals, is_broken, caplog)
    assert set(engine.counters.num_quarantines) == {"context"}
    begin = int(told[0].partition(" from ")[2].split()[0])
    assert LIMIT <= begin <= LIMIT + 8
    assert engine.counters.num_cut_tokens["quarantine"] > 0
    # Those that are short are drafted for all the while; of the others a few are tried.
    num_long, num_short = (find_drafting(steps, name) for name in ("long", "short"))
    last = max(i for i, step in enumerate(steps) if "long0" in step.num_scheduled)
    assert 0 < sum(num_long[last - 60 : last]) <= 40
    num_undrafted = sum(
        "short0" in step.num_scheduled and num_drafts == 0
        for step, num_drafts in zip(steps, num_short, strict=True)
    )
    # Its prompt, and at most its last token.
    assert num_undrafted <= 2


def test_collapse_in_a_class_ends_with_its_cause(alone, engine, caplog):
    interactive = {"max_tokens": 500, "request_class": "interactive"}
    arrivals = [
        *make_arrivals("chat", 2, prompt_len=40, **interactive),
        *make_arrivals("chatty", 2, prompt_len=250, **interactive),
        *make_arrivals("bulk", 4, prompt_len=40, max_tokens=600),
    ]
    first, end = engine.counters.num_steps, 140

    def is_broken(request, step):
        return 40 <= step - first < end and request.request_id.startswith("chat")

    steps, told = drive_broken(engine, alone, arrivals, is_broken, caplog)
    assert engine.counters.num_quarantines == {"class": 1}
    assert "class interactive" in told[0]
    num_chat, num_bulk = (find_drafting(steps, name) for name in ("chat", "bulk"))
    assert sum(num_chat[end - 60 : end]) <= 50
    assert min(num_bulk[40:120]) > 0
    # All four draft again within 50 steps.
    assert min(num_chat[end + 50 : end + 60]) >= 4 * DEPTH


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
def test_a_stale_cache_after_a_skip_is_refilled(rebuilds, alone, engine, monkeypatch):
    """In the control nothing fills it, and the same requests stay under quarantine."""
    scheduler = engine.scheduler
    if not rebuilds:
        monkeypatch.setattr(type(scheduler._watchdog), "take_rebuilds", lambda _: ())
    arrivals = make_arrivals("one", 4, prompt_len=60, max_tokens=700)
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
        assert engine.drive(arrivals) == alone.drive(arrivals)
    assert sum(scheduler.counters.num_quarantines.values()) == 1
    num_drafts = find_drafting(steps, "one")
    late = num_drafts[num_before + num_skipped + 52 :][:20]
    assert (min(late) >= 4 * DEPTH) == rebuilds


def test_under_a_new_policy_nothing_is_under_quarantine_any_more(engine):
    scheduler = engine.scheduler
    scheduler.counters.num_quarantined["all"] = 3
    section = {"policy": "fixed", "draft_tokens": DEPTH, "max_draft_tokens": DEPTH}
    scheduler.change_policy(section)
    assert scheduler.snapshot()["num_quarantined"] == {}
