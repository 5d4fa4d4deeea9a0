"""At temperature 0 and in float32 speculation changes no token id.

In bf16: `test_real_model`.
"""

from dataclasses import replace

import numpy as np
import pytest

from serving.engine.cpu.step_clock import StepClock
from tests.engine.checks import Arrival, greedy
from tests.engine.conftest import run_engine
from tests.engine.made_up import make_up_costs
from tests.engine.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_REQUESTS = 240

DEPTH = 5

FEATURES = (
    {"ignore_eos": False},
    {},
    {"extra_args": {"speculative_decoding": "off"}, "ignore_eos": False},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    {"min_tokens": 5, "stop_token_ids": list(range(3, 20)), "ignore_eos": False},
    {"allowed_token_ids": list(range(10, 40)), "ignore_eos": False},
    {"bad_words": ["a", "e", "01"], "ignore_eos": False},
    {"logprobs": 3, "ignore_eos": False},
)
"""Settings that touch verification; the requests take them in turn."""


def make_arrivals(seed=0):
    """Draw prompts, settings and arrivals; a third of the prompts share a prefix."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB_SIZE, size=80).tolist()
    arrivals = []
    step = 0
    for number in range(NUM_REQUESTS):
        # At most four arrive before one step, so that the batch turns over.
        step += int(rng.integers(0, 3)) if number % 4 == 0 else 0
        length = int(rng.integers(1, 60)) if number % 3 else int(rng.integers(60, 150))
        own = rng.integers(3, VOCAB_SIZE, size=length).tolist()
        prefix = shared[: int(rng.integers(16, 80))] if number % 3 == 1 else []
        settings = FEATURES[number % len(FEATURES)]
        params = greedy(int(rng.integers(5, 60)), **settings)
        arrivals.append(Arrival(str(number), prefix + own, params, step))
    return arrivals


def find_tokens(engine):
    """Return the tokens of every request."""
    return {name: ids for name, (ids, *_) in engine.drive(make_arrivals()).items()}


@pytest.fixture(scope="module")
def expected(plain):
    """The token ids without speculation."""
    return find_tokens(plain)


@pytest.fixture(scope="module")
def engine(tiny_pair, plain):
    with run_engine(
        *tiny_pair,
        policy="fixed",
        draft_tokens=DEPTH,
        skip_tokenizer_init=False,  # For bad words.
        # Prompts are cut in chunks, which share steps with those that run.
        max_num_batched_tokens=128,
        # Room for about half of them: some are preempted and start over.
        kv_cache_memory_bytes=4 << 20,
        max_model_len=256,
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    ("policy", "draft_tokens", "max_draft_tokens"),
    [
        ("fixed", 4, 5),
        ("tetris", 2, 5),
        ("dynamic", 4, 4),
        ("goodput", 4, 4),
    ],
)
def test_float32_token_ids_equal_those_without_speculation(
    policy, draft_tokens, max_draft_tokens, engine, expected
):
    depths = {"draft_tokens": draft_tokens, "max_draft_tokens": max_draft_tokens}
    engine.set_policy(policy, **depths)
    scheduler, counters = engine.scheduler, engine.counters
    if policy in ("dynamic", "goodput"):
        make_up_costs(engine)
    assert len(expected) == NUM_REQUESTS
    with engine.watch() as steps:
        assert find_tokens(engine) == expected
    assert any(any(step.is_chunk) and not all(step.is_chunk) for step in steps)
    assert not counters.num_fallbacks
    assert counters.num_accepted_tokens > NUM_REQUESTS
    assert counters.num_accepted_tokens < counters.num_verified_tokens
    assert counters.num_cut_tokens["opt_out"] > 0
    assert counters.num_cut_tokens["min_tokens"] > 0
    # Goodput lets in as many as will fit to their end; the others let vLLM find out.
    num_preempted = sum(step.num_preempted for step in steps)
    assert (num_preempted > 0) == (policy != "goodput")
    if policy in ("tetris", "goodput"):
        assert counters.num_cut_tokens["budget"] > NUM_REQUESTS
    # What was learnt can be handed to a new engine.
    scheduler.import_state(scheduler.export_state())
    if policy in ("dynamic", "goodput"):
        assert scheduler.snapshot()["planner"]["warm_depth0_ms"] > 0


def pay_for_drafts(monkeypatch):
    """Let every step take what one of a large target with a small drafter does."""
    finish = StepClock.finish

    def make_up(clock, now_s):
        timing = finish(clock, now_s)
        return timing and replace(
            timing,
            target_ms=60.0 + 0.3 * timing.num_tokens,
            sample_ms=0.0,
            draft_first_ms=0.4 * (timing.depth > 0),
            draft_next_ms=0.4 * max(0, timing.depth - 1),
            host_ms=1.0,
        )

    monkeypatch.setattr(StepClock, "finish", make_up)


@pytest.mark.parametrize(("policy", "num_held"), [("goodput", 0), ("fixed", 60)])
def test_audited_and_held_steps_change_no_token_id(
    policy, num_held, engine, expected, monkeypatch
):
    engine.set_policy(policy, draft_tokens=4, max_draft_tokens=4, audit=0.2)
    scheduler = engine.scheduler
    scheduler.vllm_config.additional_config["tetris"]["audit"] = 0.0
    pay_for_drafts(monkeypatch)
    trials = [scheduler._planner.holding.at(num_reqs) for num_reqs in (1, 2, 4, 8, 16)]
    for trial in trials:
        trial.hold_steps = num_held
    assert find_tokens(engine) == expected
    assert not scheduler.counters.num_fallbacks
    report = scheduler.snapshot()["planner"]
    assert report["num_audited_none"] > 0
    assert report["audited_step_share"] > 0.02
    # Held first, and then let go, in the middle of requests.
    assert min(trial.hold_steps for trial in trials) == 0
    assert scheduler.counters.num_verified_tokens > NUM_REQUESTS
