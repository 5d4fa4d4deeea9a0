"""Freed memory goes back to the system, though something later is still in use."""

import psutil

from serving.engine.shared.heap import PERIOD_S, HeapTrimmer

NUM_BLOCKS = 1024
BLOCK_BYTES = 1 << 16
"""Small enough for glibc's heap; larger ones have pages of their own."""


def memory_mib():
    return psutil.Process().memory_info().rss / (1 << 20)


def test_freed_memory_goes_back_once_a_minute_though_what_came_later_is_kept():
    trimmer = HeapTrimmer()
    assert trimmer.trim(0.0)
    for at_s, is_due in ((PERIOD_S - 1, False), (PERIOD_S, True)):
        # One in eight is kept, as what a request leaves behind is.
        blocks = [b"x" * BLOCK_BYTES for _ in range(NUM_BLOCKS)]
        kept = blocks[7::8]
        del blocks
        before_mib = memory_mib()
        assert trimmer.trim(at_s) is is_due
        given_back = before_mib - memory_mib() > NUM_BLOCKS * BLOCK_BYTES / (2 << 20)
        assert given_back is is_due
        del kept
