"""Time a policy by itself: what one engine step pays for deciding.

Run with `python -m loadtest.bench_selection`, on one core. Targets: 100 microseconds
for the selection of `tetris` at 256 requests that drafted 8 tokens each, 200 for all
that `goodput` does in a step at 64 requests (`--policy goodput --requests 64`): the
batch while others wait, selection, depth, a look at the draft after every pass, and
learning. What the engine's adapter adds, collecting the requests' figures, is in
`tetris_planning_seconds_total` of a running engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.batching import EngineLoad
from policies.registry import build_planner
from policies.types import (
    DraftBatch,
    EngineLimits,
    PolicySpec,
    StepTiming,
    VerificationOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from policies.planner import Planner

NUM_WARM_UP = 200


LATENCY_TARGET_MS = 50.0
"""Of every fourth request, where there are classes: tight, but within reach."""


class MadeUpStep:
    """One step's inputs: random confidences, and a clock with a tenth of noise."""

    def __init__(
        self,
        rng: np.random.Generator,
        num_reqs: int,
        depth: int,
        *,
        has_classes: bool = False,
    ) -> None:
        """Draw them; confidences are mostly high, as a drafter's are."""
        self._rng = rng
        self.weights = None
        targets_ms = None
        self.latency_target_ms: float | None = None
        if has_classes:
            is_bound = np.arange(num_reqs) % 4 == 0
            self.weights = np.where(is_bound, 4.0, 1.0)
            self.latency_target_ms = LATENCY_TARGET_MS
            targets_ms = np.where(is_bound, LATENCY_TARGET_MS, np.inf)
        self.load = EngineLoad(
            num_running=num_reqs,
            num_decode_tokens=num_reqs * (1 + depth),
            num_context_tokens=100 * num_reqs,
            tokens_to_grow=rng.integers(1, 200, num_reqs),
            block_size=16,
            latency_target_ms=self.latency_target_ms,
        )
        self.num_reqs = num_reqs
        self.req_ids = tuple(map(str, range(num_reqs)))
        confidence = rng.beta(3.0, 1.0, (num_reqs, depth))
        self.confidence_by_pass: list[list[float]] = confidence.T.tolist()
        self.batch = DraftBatch(
            num_draft_tokens=np.full(num_reqs, depth, dtype=np.int64),
            confidence=confidence,
            req_ids=self.req_ids,
            num_decodes=num_reqs,
            num_context_tokens=100 * num_reqs,
            weights=self.weights,
            latency_targets_ms=targets_ms,
        )

    def verify(self, num_admitted: NDArray[np.int64]) -> VerificationOutcome:
        """Accept three of four."""
        luck = self._rng.geometric(0.25, self.num_reqs) - 1
        return VerificationOutcome(
            num_admitted, np.minimum(luck, num_admitted), self.req_ids
        )

    def time(self, num_verified: int, depth: int) -> StepTiming:
        """Charge a fixed price and one per token."""
        num_tokens = self.num_reqs + num_verified
        return StepTiming(
            num_reqs=self.num_reqs,
            num_decode_tokens=num_tokens,
            num_prefill_tokens=0,
            num_context_tokens=100 * self.num_reqs,
            depth=depth,
            target_ms=(10.0 + 0.1 * num_tokens) * self._rng.lognormal(0.0, 0.1),
            draft_first_ms=1.0,
            draft_next_ms=0.5 * depth,
            host_ms=1.0,
        )


def time_planning(
    planner: Planner,
    num_reqs: int,
    depth: int,
    repeats: int,
    *,
    has_classes: bool = False,
) -> tuple[list[float], list[float]]:
    """Drive a planner as an engine does, step by step.

    Args:
        planner: Whose time it is.
        num_reqs: Requests with drafts; one more or less from step to step.
        depth: Drafts each of them offers.
        repeats: Measured steps.
        has_classes: Every fourth request weighs more and has a latency target.

    Returns:
        Microseconds of processor time of the selection alone and of all the planner
        does in a step, in the order of the steps.
    """
    rng = np.random.default_rng(0)
    selecting_us, planning_us = [], []
    timing: StepTiming | None = None
    for number in range(NUM_WARM_UP + repeats):
        step = MadeUpStep(
            rng, max(1, num_reqs - number % 2), depth, has_classes=has_classes
        )
        started = time.thread_time()
        if timing is not None:
            planner.observe_timing(timing)
        selecting = time.thread_time()
        selection = planner.select(step.batch)
        selected = time.thread_time()
        planner.plan_batch(step.load)
        planner.choose_depth(step.num_reqs, step.latency_target_ms)
        watch_draft(planner, step)
        planned = time.thread_time()
        outcome = step.verify(selection.num_admitted)
        observing = time.thread_time()
        planner.observe(outcome)
        done = time.thread_time()
        timing = step.time(int(selection.num_admitted.sum()), depth)
        selecting_us.append(1e6 * (selected - selecting))
        planning_us.append(1e6 * (planned - started + done - observing))
    return selecting_us[NUM_WARM_UP:], planning_us[NUM_WARM_UP:]


def watch_draft(planner: Planner, step: MadeUpStep) -> None:
    """Look at a draft after each of the drafter's passes, as a worker does."""
    stop = planner.early_exit(step.req_ids, step.weights)
    if stop is None:
        return
    watch = stop.start(step.req_ids)
    for confidence in step.confidence_by_pass:
        if not watch.should_continue(confidence):
            return


def main(argv: Sequence[str] | None = None) -> None:
    """Print medians, means and 95th percentiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=("tetris", "goodput"), default="tetris")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument(
        "--draft-tokens", type=int, default=4, help="capacity of tetris, per request"
    )
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument(
        "--classes",
        action="store_true",
        help="every fourth request weighs more and has a latency target",
    )
    args = parser.parse_args(argv)
    spec = PolicySpec("goodput", max_draft_tokens=args.depth)
    if args.policy == "tetris":
        spec = PolicySpec("tetris", args.draft_tokens, max_draft_tokens=args.depth)
    planner = build_planner(spec, EngineLimits(skips_drafter=True, exits_early=True))
    timings = time_planning(
        planner, args.requests, args.depth, args.repeats, has_classes=args.classes
    )
    sys.stdout.write(
        f"{args.policy}, {args.requests} requests x {args.depth} positions, "
        f"{args.repeats} steps\n"
    )
    for name, timings_us in zip(("selection", "whole step"), timings, strict=True):
        median_us, p95_us = np.percentile(timings_us, [50, 95])
        sys.stdout.write(
            f"{name}: median {median_us:.0f} us, mean {np.mean(timings_us):.0f} us, "
            f"95th percentile {p95_us:.0f} us\n"
        )


if __name__ == "__main__":
    main()
