"""Time draft selection by itself: what one engine step pays for choosing.

Run with `python -m loadtest.bench_selection`. One core; the target is 100 microseconds
for 256 requests that drafted 8 tokens each.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from policies.batch import DraftBatch, PolicySpec
from policies.planner import build_planner

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_WARM_UP = 50


def time_selection(
    num_reqs: int, max_depth: int, draft_tokens: int, repeats: int
) -> list[float]:
    """Time the `tetris` planner on fresh random batches.

    Args:
        num_reqs: Requests with drafts.
        max_depth: Drafts each of them offers.
        draft_tokens: Verification capacity per request, <= `max_depth`.
        repeats: Measured selections.

    Returns:
        Microseconds of each selection, in the order they were made.
    """
    rng = np.random.default_rng(0)
    planner = build_planner(
        PolicySpec("tetris", draft_tokens, max_depth - draft_tokens)
    )
    lengths = np.full(num_reqs, max_depth, dtype=np.int64)
    timings_us = []
    for _ in range(NUM_WARM_UP + repeats):
        batch = DraftBatch(lengths, rng.random((num_reqs, max_depth)))
        started = time.perf_counter()
        planner.select(batch)
        timings_us.append((time.perf_counter() - started) * 1e6)
    return timings_us[NUM_WARM_UP:]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the median and the 95th percentile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2000)
    args = parser.parse_args(argv)
    timings_us = time_selection(
        args.requests, args.depth, args.draft_tokens, args.repeats
    )
    median_us, p95_us = np.percentile(timings_us, [50, 95])
    sys.stdout.write(
        f"{args.requests} requests x {args.depth} positions, budget "
        f"{args.requests * args.draft_tokens}: median {median_us:.0f} us, "
        f"95th percentile {p95_us:.0f} us ({args.repeats} selections)\n"
    )


if __name__ == "__main__":
    main()
