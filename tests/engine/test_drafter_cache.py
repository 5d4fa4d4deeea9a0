"""What is remembered of a drafter's cache that has holes."""

import numpy as np

from serving.engine.cpu.drafter_cache import DrafterCache, MissingSpan, split_spans

BLOCKS = np.array([7, 8, 9, 20], dtype=np.int32)


def fill_one(cache, req_id, start, num_tokens, blocks):
    """Fill a step of one request."""
    starts = np.array([start], dtype=np.int32)
    return cache.fill([req_id], starts, np.array([num_tokens]), blocks[None]).get(0)


def test_a_resumed_request_forgets_what_it_missed_and_one_that_ended_is_pruned():
    cache = DrafterCache(block_size=4)
    for index in range(100):
        cache.skip(str(index), 0, 1, BLOCKS)
    cache.prune({"3"})
    assert cache._missing_from == {"3": 0}
    cache.admit("3", 0, BLOCKS[:0])
    assert fill_one(cache, "3", 0, 3, BLOCKS[3:]) is None


def test_what_was_skipped_is_missing_until_somebody_fills_it():
    cache = DrafterCache(block_size=4)
    assert fill_one(cache, "a", 9, 1, BLOCKS) is None
    cache.skip("a", 5, 1, BLOCKS)
    cache.skip("a", 6, 6, BLOCKS)
    # Whoever hits an incomplete block is filled from there.
    cache.admit("b", 12, BLOCKS)
    assert fill_one(cache, "b", 12, 1, BLOCKS) == 4
    assert fill_one(cache, "a", 12, 1, BLOCKS) == 5
    assert fill_one(cache, "a", 13, 1, BLOCKS) is None
    cache.admit("c", 12, BLOCKS)
    assert fill_one(cache, "c", 12, 1, BLOCKS) is None


def test_what_is_in_doubt_is_filled_once_from_the_first_position():
    cache = DrafterCache(block_size=4)
    cache.skip("a", 5, 1, BLOCKS)
    cache.doubt("a")
    assert fill_one(cache, "a", 9, 1, BLOCKS) == 0
    assert fill_one(cache, "a", 10, 1, BLOCKS) is None


def test_spans_are_packed_into_passes_and_long_ones_cut():
    spans = [MissingSpan(0, 0, 5), MissingSpan(1, 10, 13), MissingSpan(2, 3, 4)]
    assert split_spans(spans, 6) == [
        [MissingSpan(0, 0, 5), MissingSpan(1, 10, 11)],
        [MissingSpan(1, 11, 13), MissingSpan(2, 3, 4)],
    ]
    assert split_spans([], 6) == []
