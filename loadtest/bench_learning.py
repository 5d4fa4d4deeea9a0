"""What learning from a noisy clock costs: `goodput` beside itself with exact prices.

Run with `python -m loadtest.bench_learning`; about a minute on one core. A made-up
engine with a closed loop of requests is played several times with the same requests,
drafts and luck: under `goodput` that learns prices from a clock with noise, under
`goodput` that is told them, and under every fixed length. Throughput is counted by the
exact prices, so that noise acts through decisions alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from policies.goodput import GoodputPlanner
from policies.types import (
    CostProfile,
    DraftBatch,
    EngineLimits,
    StepTiming,
    VerificationOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_DEPTH = 8
FIXED_LENGTHS = range(1, 7)

STEP_MS, TOKEN_MS, CONTEXT_MS = 46.0, 2.2, 0.003
"""The demo target at 100 M parameters, float32, on one thread of a Xeon at 2.8 GHz."""

DRAFT_STEP_MS, DRAFT_TOKEN_MS, DRAFT_PASS_MS, HOST_MS = 2.0, 0.02, 3.0, 4.0

PROMPT_TOKENS = 30
OUTPUT_TOKENS = (5, 100)
PROFILE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Noise:
    """How a clock errs.

    Attributes:
        jitter: Standard deviation of the logarithm of a step's factor.
        wander: The same of what is added in a step to a factor that lasts.
        memory: Share of the lasting factor that is left in the next step.
        profile_slope: Factor on the price of a token in the start-up profile.
    """

    jitter: float
    wander: float = 0.0
    memory: float = 0.99
    profile_slope: float = 1.0


CLOCKS = {
    "quiet": Noise(0.03),
    "wandering": Noise(0.1, wander=0.05),
    "wandering, wrong profile": Noise(0.1, wander=0.05, profile_slope=0.5),
}


@dataclass(slots=True)
class MadeUpLoad:
    """Requests that follow each other, each with its own difficulty and length.

    What a step draws depends on the seed and the step alone, whatever was decided.
    """

    num_reqs: int
    seed: int
    num_begun: int = field(init=False, default=0)
    ids: list[str] = field(init=False, default_factory=list)
    num_left: NDArray[np.float64] = field(init=False)
    context: NDArray[np.float64] = field(init=False)
    ease: NDArray[np.float64] = field(init=False)
    has_prompt: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        """Begin all requests in mid-reply."""
        self.ids = [""] * self.num_reqs
        self.num_left, self.context, self.ease = np.zeros((3, self.num_reqs))
        self.has_prompt = np.zeros(self.num_reqs, dtype=bool)
        for row in range(self.num_reqs):
            self._begin(row)
        self.has_prompt[:] = False

    def draw(self, step: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return confidence and true acceptance, `[num_reqs, MAX_DEPTH]`."""
        rng = np.random.default_rng((self.seed, 1, step))
        log_odds = rng.normal(1.5, 2.0, (self.num_reqs, MAX_DEPTH))
        log_odds += self.ease[:, None]
        return _sigmoid(log_odds), _sigmoid(0.9 * log_odds - 0.3)

    def draw_luck(self, step: int) -> NDArray[np.float64]:
        """Return what decides about acceptance, `[num_reqs, MAX_DEPTH]`, 0-1."""
        rng = np.random.default_rng((self.seed, 2, step))
        return rng.random((self.num_reqs, MAX_DEPTH))

    def advance(self, num_tokens: NDArray[np.int64]) -> list[str]:
        """Give requests their tokens; return those that ended."""
        self.has_prompt[:] = False
        self.context += num_tokens
        self.num_left -= num_tokens
        ended = np.flatnonzero(self.num_left <= 0)
        names = [self.ids[row] for row in ended]
        for row in ended:
            self._begin(row)
        return names

    def _begin(self, row: int) -> None:
        rng = np.random.default_rng((self.seed, 3, self.num_begun))
        self.ids[row] = str(self.num_begun)
        self.num_begun += 1
        self.num_left[row] = rng.integers(*OUTPUT_TOKENS)
        self.ease[row] = rng.normal(0.0, 0.7)
        self.context[row] = PROMPT_TOKENS
        self.has_prompt[row] = True


@dataclass(slots=True)
class Clock:
    """What a planner reads of a step's time."""

    noise: Noise | None
    seed: int
    _lasting: float = field(init=False, default=0.0)
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Seed it apart from the load."""
        self._rng = np.random.default_rng((self.seed, 4))

    def next_factor(self) -> float:
        """Return what the coming step's readings are multiplied with; 1 if exact."""
        noise = self.noise
        if noise is None:
            return 1.0
        self._lasting *= noise.memory
        self._lasting += self._rng.normal(0.0, noise.wander)
        return float(np.exp(self._lasting + self._rng.normal(0.0, noise.jitter)))


def price_target(num_tokens: float) -> float:
    """Return the exact milliseconds of the target's pass, without context."""
    return STEP_MS + TOKEN_MS * num_tokens


def make_planner(noise: Noise | None) -> GoodputPlanner:
    """Build a planner with the profile that such a clock leaves it."""
    slope = 1.0 if noise is None else noise.profile_slope
    planner = GoodputPlanner.build(
        MAX_DEPTH, EngineLimits(2048, 64, skips_drafter=True, exits_early=True)
    )
    planner.fit_profile(
        CostProfile(
            PROFILE_COUNTS,
            tuple(STEP_MS + slope * TOKEN_MS * count for count in PROFILE_COUNTS),
            tuple(DRAFT_STEP_MS + DRAFT_TOKEN_MS * count for count in PROFILE_COUNTS),
        )
    )
    return planner


def play(
    planner: GoodputPlanner | int,
    load: MadeUpLoad,
    clock: Clock,
    num_steps: int,
) -> float:
    """Run a load under a planner, or under a fixed length.

    Returns:
        Tokens per exact millisecond after the first quarter of the steps.
    """
    tokens = total_ms = 0.0
    for step in range(num_steps):
        decoding = np.flatnonzero(~load.has_prompt)
        ids = tuple(load.ids[row] for row in decoding)
        confidence, acceptance = (part[decoding] for part in load.draw(step))
        num_prefill = PROMPT_TOKENS * int(load.has_prompt.sum())
        num_context = int(load.context.sum())
        if isinstance(planner, int):
            depth, num_admitted = planner, np.full(decoding.size, planner)
        else:
            depth = _draft(planner, load.num_reqs, ids, confidence)
            num_admitted = np.zeros(decoding.size, dtype=np.int64)
            if depth > 0 and decoding.size:
                offered = DraftBatch(
                    num_draft_tokens=np.full(decoding.size, depth),
                    confidence=confidence[:, :depth],
                    req_ids=ids,
                    num_decodes=decoding.size,
                    num_prefill_tokens=num_prefill,
                    num_context_tokens=num_context,
                )
                num_admitted = planner.select(offered).num_admitted
        missed = load.draw_luck(step)[decoding] >= acceptance
        first_miss = np.where(missed.any(axis=1), missed.argmax(axis=1), MAX_DEPTH)
        num_accepted = np.minimum(first_miss, num_admitted)
        num_decode = int(decoding.size + num_admitted.sum())
        exact = StepTiming(
            num_reqs=load.num_reqs,
            num_decode_tokens=num_decode,
            num_prefill_tokens=num_prefill,
            num_context_tokens=num_context,
            depth=depth,
            target_ms=price_target(num_decode + num_prefill) + CONTEXT_MS * num_context,
            draft_first_ms=DRAFT_STEP_MS + DRAFT_TOKEN_MS * (num_decode + num_prefill),
            draft_next_ms=DRAFT_PASS_MS * max(depth - 1, 0),
            host_ms=HOST_MS,
        )
        num_tokens = np.ones(load.num_reqs, dtype=np.int64)
        num_tokens[decoding] += num_accepted
        if step >= num_steps // 4:
            tokens += float(num_tokens.sum())
            total_ms += exact.total_ms
        ended = load.advance(num_tokens)
        if not isinstance(planner, int):
            planner.observe_timing(_scale(exact, clock.next_factor()))
            planner.observe(VerificationOutcome(num_admitted, num_accepted, ids))
            for req_id in ended:
                planner.forget(req_id)
    return tokens / total_ms


def compare(
    num_reqs: int, noise: Noise, seed: int, num_steps: int
) -> tuple[float, float]:
    """Return throughputs over that of exact prices: learnt ones, best fixed length."""

    def run(planner: GoodputPlanner | int, clock_noise: Noise | None) -> float:
        load = MadeUpLoad(num_reqs, seed)
        return play(planner, load, Clock(clock_noise, seed), num_steps)

    exact = run(make_planner(None), None)
    best_fixed = max(run(length, None) for length in FIXED_LENGTHS)
    return run(make_planner(noise), noise) / exact, best_fixed / exact


def main(argv: Sequence[str] | None = None) -> None:
    """Print ratios over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="4,16,32", help="in flight, e.g. 4,16,32")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args(argv)
    sys.stdout.write("throughput over goodput with exact prices: mean (smallest)\n")
    for num_reqs in map(int, args.requests.split(",")):
        for name, noise in CLOCKS.items():
            pairs = [
                compare(num_reqs, noise, seed, args.steps) for seed in range(args.seeds)
            ]
            learnt, fixed = np.transpose(pairs)
            sys.stdout.write(
                f"{num_reqs} requests, {name}: learnt {learnt.mean():.3f} "
                f"({learnt.min():.3f}), best fixed {fixed.mean():.3f} "
                f"({fixed.min():.3f})\n"
            )
            sys.stdout.flush()


def _draft(
    planner: GoodputPlanner,
    num_reqs: int,
    ids: tuple[str, ...],
    confidence: NDArray[np.float64],
) -> int:
    """Return how deep a planner lets these requests draft."""
    depth = planner.choose_depth(num_reqs)
    stop = planner.early_exit(ids) if ids and depth > 0 else None
    if stop is None:
        return depth
    watch = stop.start(ids)
    for num_passes in range(1, depth):
        if not watch.should_continue(confidence[:, num_passes - 1].tolist()):
            return num_passes
    return depth


def _scale(timing: StepTiming, factor: float) -> StepTiming:
    return replace(
        timing,
        target_ms=factor * timing.target_ms,
        draft_first_ms=factor * timing.draft_first_ms,
        draft_next_ms=factor * timing.draft_next_ms,
        host_ms=factor * timing.host_ms,
    )


def _sigmoid(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    probability: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-log_odds))
    return probability


if __name__ == "__main__":
    main()
