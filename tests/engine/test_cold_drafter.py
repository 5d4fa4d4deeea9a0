"""Depth 0 without a drafter: nothing is lost when drafting resumes."""

import numpy as np
import pytest

from policies.baselines import FixedPlanner
from serving.engine.cpu.drafter_cache import DrafterCache, MissingSpan, split_spans
from serving.engine.cpu.skipped_planning import TELL_ALL, TELL_EVERY
from tests.engine.checks import draw_prompt
from tests.engine.conftest import run_engine

DEPTH = 3


class Switched(FixedPlanner):
    """Drafts or does not, as it is told."""

    __slots__ = ("depth", "timings")

    def __init__(self):
        super().__init__(DEPTH)
        object.__setattr__(self, "depth", DEPTH)
        object.__setattr__(self, "timings", [])

    def switch(self, depth):
        object.__setattr__(self, "depth", depth)

    def choose_depth(self, num_reqs, latency_target_ms=None):
        return self.depth

    def observe_timing(self, timing):
        self.timings.append(timing)


class Alternating(FixedPlanner):
    """Drafts for some steps, then for some not, and keeps what steps cost."""

    __slots__ = ("num_off", "num_on", "num_steps", "timings")

    def __init__(self, num_on, num_off):
        super().__init__(DEPTH)
        values = {"num_on": num_on, "num_off": num_off, "num_steps": 0, "timings": []}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def choose_depth(self, num_reqs, latency_target_ms=None):
        object.__setattr__(self, "num_steps", self.num_steps + 1)
        drafting = self.num_steps % (self.num_on + self.num_off) < self.num_on
        return DEPTH if drafting else 0

    def observe_timing(self, timing):
        self.timings.append(timing)


def make_prompts(num_prompts, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"prompt_token_ids": rng.integers(3, 64, int(length)).tolist()}
        for length in rng.integers(4, 120, num_prompts)
    ]


def run(engine, prompts, max_tokens=80):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    return outputs


def generate(engine, prompts, max_tokens=80):
    return [output.outputs[0].token_ids for output in run(engine, prompts, max_tokens)]


def acceptance_rate(engine):
    counters = engine.scheduler.counters
    assert counters.num_verified_tokens > 100
    return counters.num_accepted_tokens / counters.num_verified_tokens


@pytest.mark.vllm
@pytest.mark.parametrize(("num_on", "num_off"), [(3, 7), (5, 50)])
def test_acceptance_is_what_it_was_after_steps_without_the_drafter(
    tiny_pair, num_on, num_off
):
    # The target drafts for itself: every draft must be accepted, unless the drafter
    # reads a cache with holes.
    target, _ = tiny_pair
    prompts = make_prompts(24)
    with run_engine(target) as plain:
        expected = generate(plain, prompts)
    with run_engine(
        target,
        target,
        policy="fixed",
        draft_tokens=DEPTH,
        max_num_batched_tokens=256,  # Some catch-ups take several passes.
    ) as engine:
        planner = Alternating(num_on, num_off)
        engine.scheduler._planner = planner
        assert generate(engine, prompts) == expected
        assert acceptance_rate(engine) == 1.0
        assert sum(timing.num_backlog for timing in planner.timings) > 250
        skipped = [timing for timing in planner.timings if timing.depth == 0]
        assert skipped
        assert all(timing.draft_first_ms == 0.0 for timing in skipped)


BLOCK = 32
"""The smallest KV block of vLLM's CPU attention; the default, 128, is longer than what
these tests share."""


def continue_what_was_made_without_the_drafter(target):
    """Let second requests go on where first ones, made at depth 0, ended.

    Returns:
        Output with and without speculation, and the second requests' acceptance rate.
    """
    prompts = [{"prompt_token_ids": draw_prompt(n, 3 * BLOCK)} for n in range(12)]
    engine_args = {"block_size": BLOCK, "max_model_len": 512}
    with run_engine(target, **engine_args) as plain:
        first = generate(plain, prompts)
        longer = [
            {"prompt_token_ids": prompt["prompt_token_ids"] + list(tokens)}
            for prompt, tokens in zip(prompts, first, strict=True)
        ]
        expected = [first, generate(plain, longer)]
    with run_engine(
        target, target, policy="fixed", draft_tokens=DEPTH, **engine_args
    ) as engine:
        planner = Switched()
        engine.scheduler._planner = planner
        generate(engine, make_prompts(8, seed=5))
        assert acceptance_rate(engine) == 1.0
        planner.switch(0)
        cold = generate(engine, prompts)
        num_cold = sum(timing.depth == 0 for timing in planner.timings)
        assert num_cold >= TELL_ALL + (50 - TELL_ALL) // TELL_EVERY
        # Every token but the last of a request could have been followed by a draft.
        num_undrafted = engine.scheduler.counters.num_cut_tokens["depth"]
        assert num_undrafted == DEPTH * sum(len(tokens) - 1 for tokens in cold)
        planner.switch(DEPTH)
        counters = engine.scheduler.counters
        before = counters.num_accepted_tokens, counters.num_verified_tokens
        outputs = run(engine, longer)
        # All but what fills no block: the first prompts and most of their output.
        assert min(output.num_cached_tokens for output in outputs) >= 5 * BLOCK
        num_accepted = counters.num_accepted_tokens - before[0]
        num_verified = counters.num_verified_tokens - before[1]
        assert num_verified > 100
    warm = [output.outputs[0].token_ids for output in outputs]
    return [cold, warm], expected, num_accepted / num_verified


@pytest.mark.vllm
def test_a_second_request_that_hits_the_cached_prefix_loses_nothing_either(tiny_pair):
    outputs, expected, rate = continue_what_was_made_without_the_drafter(tiny_pair[0])
    assert outputs == expected
    assert rate == 1.0


@pytest.mark.vllm
def test_unmarked_blocks_would_cost_a_second_request_its_acceptance(
    tiny_pair, monkeypatch
):
    """The control: nobody is told that cached blocks lack the drafter's half."""
    monkeypatch.setattr(DrafterCache, "admit", lambda *_: None)
    outputs, expected, rate = continue_what_was_made_without_the_drafter(tiny_pair[0])
    assert outputs == expected
    assert rate < 0.9


@pytest.mark.vllm
def test_without_catching_up_acceptance_would_fall(tiny_pair, monkeypatch):
    target, _ = tiny_pair
    monkeypatch.setattr(
        "serving.engine.cpu.cold_drafter.ColdDrafter._run_pass", lambda *args: None
    )
    with run_engine(target, target, policy="fixed", draft_tokens=DEPTH) as engine:
        engine.scheduler._planner = Alternating(3, 7)
        generate(engine, make_prompts(24))
        assert acceptance_rate(engine) < 0.9


@pytest.mark.vllm
def test_a_preempted_request_starts_over_with_a_complete_cache(tiny_pair):
    target, _ = tiny_pair
    prompts = make_prompts(12, seed=1)
    with run_engine(target) as plain:
        expected = generate(plain, prompts, max_tokens=150)
    with run_engine(
        target, target, policy="fixed", draft_tokens=DEPTH, num_gpu_blocks_override=12
    ) as engine:
        engine.scheduler._planner = Alternating(3, 7)
        assert generate(engine, prompts, max_tokens=150) == expected
        metrics = {m.name: m for m in engine.llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0
        assert acceptance_rate(engine) == 1.0


@pytest.mark.vllm
@pytest.mark.parametrize("policy", ["dynamic", "goodput"])
def test_adaptive_policies_leave_the_output_alone(tiny_pair, policy):
    target, draft = tiny_pair
    prompts = make_prompts(40, seed=2)
    with run_engine(target) as plain:
        expected = generate(plain, prompts)
    with run_engine(target, draft, policy=policy, draft_tokens=4) as engine:
        assert generate(engine, prompts) == expected
        snapshot = engine.scheduler.snapshot()
        assert snapshot["num_fallbacks"] == {}
        assert snapshot["num_verified_tokens"] > 0
        assert snapshot["planner"]["measured_step_ms"] > 0
        assert snapshot["planner"]["warm_depth0_ms"] > 0
        # What it learnt can be handed to a new engine.
        engine.scheduler.import_state(engine.scheduler.export_state())


def make_blocks(*ids):
    return np.array(ids, dtype=np.int32)


def fill_one(cache, req_id, start, num_tokens, blocks):
    """Fill a step of one request."""
    starts = np.array([start], dtype=np.int32)
    return cache.fill([req_id], starts, np.array([num_tokens]), blocks[None]).get(0)


def test_skipped_positions_are_missing_from_the_first_one_on():
    cache = DrafterCache(block_size=4)
    blocks = make_blocks(7, 8, 9)
    cache.skip("a", 5, 1, blocks)
    cache.skip("a", 6, 1, blocks)
    assert fill_one(cache, "a", 7, 1, blocks) == 5
    assert fill_one(cache, "a", 8, 1, blocks) is None


def test_nothing_is_missing_where_nothing_was_skipped():
    cache = DrafterCache(block_size=4)
    assert cache.is_complete
    assert fill_one(cache, "a", 9, 1, make_blocks(1, 2, 3)) is None


def test_a_request_that_hits_an_incomplete_block_is_filled_from_there():
    cache = DrafterCache(block_size=4)
    cache.skip("a", 4, 8, make_blocks(7, 8, 9))
    cache.admit("b", 12, make_blocks(7, 8, 9, 20))
    assert fill_one(cache, "b", 12, 1, make_blocks(7, 8, 9, 20)) == 4


def test_a_filled_block_is_complete_for_everybody_after():
    cache = DrafterCache(block_size=4)
    blocks = make_blocks(7, 8, 9)
    cache.skip("a", 4, 8, blocks)
    fill_one(cache, "a", 12, 1, make_blocks(7, 8, 9, 10))
    cache.admit("b", 12, make_blocks(7, 8, 9, 20))
    assert fill_one(cache, "b", 12, 1, make_blocks(7, 8, 9, 20)) is None


def test_requests_of_a_step_are_filled_together_as_they_would_be_one_by_one():
    rng = np.random.default_rng(0)
    num_reqs, num_spans = 12, 0
    req_ids = [str(row) for row in range(num_reqs)]
    together, single = DrafterCache(block_size=4), DrafterCache(block_size=4)
    for _ in range(200):
        starts = rng.integers(0, 60, num_reqs).astype(np.int32)
        counts = rng.integers(1, 20, num_reqs)
        # Few ids: requests share blocks, and others' blocks are used again.
        blocks = rng.integers(1, 60, (num_reqs, 20)).astype(np.int32)
        for row in rng.choice(num_reqs, 3, replace=False):
            for cache in (together, single):
                cache.skip(
                    req_ids[row], int(starts[row]), int(counts[row]), blocks[row]
                )
        starts += rng.integers(-3, 4, num_reqs).clip(-starts)
        firsts = together.fill(req_ids, starts, counts, blocks)
        assert firsts == {
            row: first
            for row, req_id in enumerate(req_ids)
            if (
                first := fill_one(
                    single, req_id, int(starts[row]), int(counts[row]), blocks[row]
                )
            )
            is not None
        }
        assert together == single
        num_spans += len(firsts)
    assert num_spans > 100
    assert single._incomplete_blocks


def test_a_resumed_request_forgets_what_it_missed_before():
    cache = DrafterCache(block_size=4)
    cache.skip("a", 2, 1, make_blocks(7))
    cache.admit("a", 0, make_blocks())
    assert fill_one(cache, "a", 0, 3, make_blocks(5)) is None


def test_requests_that_ended_are_pruned():
    cache = DrafterCache(block_size=4)
    for index in range(100):
        cache.skip(str(index), 0, 1, make_blocks(1))
    cache.prune({"3"})
    assert cache._missing_from == {"3": 0}


def test_spans_are_packed_into_passes_and_long_ones_cut():
    spans = [MissingSpan(0, 0, 5), MissingSpan(1, 10, 13), MissingSpan(2, 3, 4)]
    assert split_spans(spans, 6) == [
        [MissingSpan(0, 0, 5), MissingSpan(1, 10, 11)],
        [MissingSpan(1, 11, 13), MissingSpan(2, 3, 4)],
    ]
    assert split_spans([], 6) == []
