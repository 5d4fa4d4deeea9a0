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


def test_spans_are_packed_into_passes_and_long_ones_cut():
    spans = [MissingSpan(0, 0, 5), MissingSpan(1, 10, 13), MissingSpan(2, 3, 4)]
    assert split_spans(spans, 6) == [
        [MissingSpan(0, 0, 5), MissingSpan(1, 10, 11)],
        [MissingSpan(1, 11, 13), MissingSpan(2, 3, 4)],
    ]
    assert split_spans([], 6) == []
