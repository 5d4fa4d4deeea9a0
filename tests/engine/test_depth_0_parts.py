"""What depth 0 is made of: steps that need no plan, and a cache that has holes."""

import numpy as np
import pytest

from serving.engine.cpu.drafter_cache import DrafterCache, MissingSpan, split_spans
from serving.engine.cpu.skipped_planning import TELL_ALL, TELL_EVERY, SkippedPlanning
from serving.engine.shared.batch_limits import RequestPace

NUM_REQS = 4


def plan(skipping, depth=0, **other):
    """Plan a step in which every running request gets a token, but for `other`."""
    sizes = {"num_tokens": NUM_REQS, "num_scheduled": NUM_REQS, "num_running": NUM_REQS}
    skipping.note_planned(depth, **(sizes | other))


def settle(**how):
    """Return the state after so many planned steps that the next needs no plan."""
    skipping = SkippedPlanning(**({"is_possible": True} | how))
    for _ in range(TELL_ALL + 1):
        plan(skipping)
    return skipping


def test_the_first_steps_at_depth_0_are_all_planned_and_timed():
    skipping = SkippedPlanning(is_possible=True)
    for _ in range(TELL_ALL):
        assert not skipping.is_due(NUM_REQS, 0)
        plan(skipping)
        assert not skipping.is_quiet


def test_then_one_of_many_is_timed_and_the_next_one_planned():
    skipping = settle()
    planned, timed = [], []
    for step in range(TELL_ALL + 2, TELL_ALL + 2 + 3 * TELL_EVERY):
        if skipping.is_due(NUM_REQS, 0):
            skipping.note_unplanned()
        else:
            planned.append(step)
            plan(skipping)
        if not skipping.is_quiet:
            timed.append(step)

    assert timed == [TELL_ALL + TELL_EVERY * n for n in (1, 2, 3)]
    assert planned == [step + 1 for step in timed]


def test_unplanned_steps_are_counted_until_the_planner_is_asked_again():
    skipping = settle()
    while skipping.is_due(NUM_REQS, 0):
        skipping.note_unplanned()

    assert skipping.num_skipped == TELL_EVERY - 1
    assert skipping.is_unchanged(NUM_REQS)
    assert not skipping.is_unchanged(NUM_REQS - 1)
    plan(skipping)
    assert skipping.num_skipped == 0
    assert not skipping.is_unchanged(NUM_REQS)


@pytest.mark.parametrize(
    ("num_running", "num_waiting"), [(NUM_REQS - 1, 0), (NUM_REQS, 1), (0, 0)]
)
def test_whoever_leaves_or_waits_ends_it(num_running, num_waiting):
    skipping = settle()
    assert skipping.is_due(NUM_REQS, 0)
    assert not skipping.is_due(num_running, num_waiting)


@pytest.mark.parametrize(
    "other", [{"num_tokens": 9}, {"num_scheduled": 3, "num_tokens": 3}, {"depth": 1}]
)
def test_only_the_same_requests_with_a_token_each_may_go_on(other):
    skipping = settle()
    plan(skipping, **other)
    assert not skipping.is_due(NUM_REQS, 0)


def test_drafting_starts_the_count_anew():
    skipping = settle()
    plan(skipping, depth=2)
    plan(skipping)
    assert not skipping.is_quiet
    assert not skipping.is_due(NUM_REQS, 0)


def test_an_engine_that_runs_its_drafter_at_depth_0_plans_every_step():
    skipping = settle(is_possible=False)
    assert not skipping.is_due(NUM_REQS, 0)
    assert not skipping.is_quiet


def test_skipped_steps_weigh_on_the_pace_as_planned_ones_would():
    step_by_step, at_once = RequestPace(), RequestPace()
    for pace in (step_by_step, at_once):
        pace.note(30, 10)
    for _ in range(7):
        step_by_step.note(30, 10)
    at_once.note_skipped_steps(7)

    assert at_once.tokens_per_step > 1.0
    assert at_once.tokens_per_step == pytest.approx(step_by_step.tokens_per_step)


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
