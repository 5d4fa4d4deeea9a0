"""A fleet under a load: one run, and what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from policies.decisions.recent_drafts import NUM_REMEMBERED_DRAFTS, NUM_SAMPLES
from policies.decisions.routing import NUM_DRAWS, USUAL_BASE_SHARE
from policies.estimators.reply_length import USUAL_TOKENS

from . import kernel, routers
from .drawn import Drawn
from .engine import Engine
from .prefixes import make_prefixes
from .state import NO_REQUEST, Events, Fleet, Floats, Requests, Slots, Telemetry

ROUTERS: Final = {
    "round-robin": routers.ROUND_ROBIN,
    "least-requests": routers.LEAST_REQUESTS,
    "power-of-two": routers.POWER_OF_TWO,
    "least-sent": routers.LEAST_SENT,
    "power-of-two-sent": routers.TWO_SENT,
    "ours": routers.OURS,
}
"""Routers by name. `requests` and `two` see how many requests each replica had; `sent`
counts its own at once, and hears late only of those that left, as `ours` does."""

PREFIX_ROUTERS: Final = {"prefix-affinity": routers.PREFIX}
"""Those that without shared prefixes are another one."""

PIECES: Final = 20
"""Calls of `on_piece` in a run."""

WARM_UP_SHARE: Final = 0.1
"""Of the requests, first to arrive, that meet an empty fleet and are not measured."""

LEAST_REQUESTS: Final = 100
"""In a run, for a 99th percentile to mean anything."""

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good request keeps to."""

    ttft_ms: float  # longest time to its first token
    tpot_ms: float  # longest mean time of each token after that


def run_fleet(
    engine: Engine,
    drawn: Drawn,
    num_replicas: int,
    router: str,
    staleness_s: float,
    seed: int,
    slow: tuple[float, float] = (0.0, 1.0),
    on_piece: Callable[[], None] | None = None,
    decide: Callable[[Fleet, int], None] = lambda _fleet, _replica: None,
) -> Fleet:
    """Run a fleet until all requests are answered.

    Args:
        engine: Of every replica.
        drawn: What arrives.
        num_replicas: >= 1.
        router: One of `ROUTERS` or `PREFIX_ROUTERS`.
        staleness_s: How old what it knows of the replicas is.
        seed: Of acceptance and of the router's draws.
        slow: Share of the replicas that are slow, and how many times longer their steps
            take.
        on_piece: Called `PIECES` times on the way.
        decide: Sets depth and drafts of a replica's step where they are `ASKED` for.
    """
    fleet = make_fleet(engine, drawn, num_replicas, seed)
    share, times = slow
    fleet.slowness[: round(share * num_replicas)] = times
    number, age_s = (ROUTERS | PREFIX_ROUTERS)[router], float(staleness_s)
    # Each call reads through the types of some eighty arrays.
    num_pieces = 1 if on_piece is None else PIECES
    for piece in range(1, num_pieces + 1):
        until = drawn.arrival_s.size * piece // num_pieces
        while (asked := kernel.advance(fleet, number, age_s, until, np.inf)) >= 0:
            decide(fleet, asked)
        if on_piece is not None:
            on_piece()
    return fleet


def find_speed(num_replicas: int, slow: tuple[float, float]) -> float:
    """Return how many replicas that are not slow would do as much."""
    share, times = slow
    num_slow = round(share * num_replicas)
    return num_replicas - num_slow + num_slow / times


def make_fleet(engine: Engine, drawn: Drawn, num_replicas: int, seed: int) -> Fleet:
    """Return an idle fleet, before anything comes."""
    size, count = engine.costs.max_num_seqs, drawn.arrival_s.size
    names = drawn.chain_first if drawn.chain_first.size else np.zeros(count + 1, int)
    return Fleet(
        costs=engine.costs,
        drafts=engine.drafts,
        requests=Requests(
            *(drawn.arrival_s, drawn.num_prompt_tokens, drawn.num_output_tokens),
            kind=drawn.kind,
            replica=np.zeros(count, np.int64),
            first_token_s=np.full(count, np.nan),
            finish_s=np.full(count, np.nan),
            num_finishes=np.zeros(count, np.int64),
            num_emitted=np.zeros(count, np.int64),
            resumed_s=np.full(count, np.nan),
            num_cached=np.zeros(count, np.int64),
            luck=np.arange(count),
            chain=drawn.chain,
            chain_first=names,
        ),
        seed=seed,
        slots=Slots(*(np.zeros((num_replicas, size), np.int64) for _ in Slots._fields)),
        slot_draw=np.zeros((num_replicas, size), np.uint64),
        num_running=np.zeros(num_replicas, np.int64),
        num_kv_tokens=np.zeros(num_replicas, np.int64),
        num_kv_held=np.zeros(num_replicas, np.int64),
        first_waiting=np.full(num_replicas, NO_REQUEST, np.int64),
        last_waiting=np.full(num_replicas, NO_REQUEST, np.int64),
        next_waiting=np.full(count, NO_REQUEST, np.int64),
        heap_s=np.zeros(num_replicas),
        heap_replica=np.zeros(num_replicas, np.int64),
        tokens_per_step=np.ones(num_replicas),
        max_running=np.full(num_replicas, size, np.int64),
        slowness=np.ones(num_replicas),
        depth=np.zeros(num_replicas, np.int64),
        recent=np.zeros((num_replicas, NUM_REMEMBERED_DRAFTS), np.int64),
        num_steps=np.zeros((num_replicas, 2), np.int64),
        # As `GoodputPlanner` begins: one deep.
        plan=np.tile([1.0, 0.0, 0.0], (num_replicas, 1)),
        next_acceptance=np.ones((num_replicas, NUM_SAMPLES)),
        events=Events(
            when_s=np.zeros(3 * count),
            kind=np.zeros(3 * count, np.int64),
            request=np.zeros(3 * count, np.int64),
            tokens_per_step=np.zeros(3 * count),
            num_running=np.zeros(3 * count, np.int64),
            num_kv_tokens=np.zeros(3 * count, np.int64),
        ),
        telemetry=Telemetry(
            num_there=np.zeros(num_replicas, np.int64),
            num_sent=np.zeros(num_replicas, np.int64),
            num_prompt_tokens=np.zeros(num_replicas, np.int64),
            tokens_per_step=np.ones(num_replicas),
            num_running=np.zeros(num_replicas, np.int64),
            num_kv_tokens=np.zeros(num_replicas, np.int64),
            can_take=np.ones(num_replicas, np.bool_),
            learnt=np.array([USUAL_BASE_SHARE, USUAL_TOKENS]),
            draws=np.zeros(NUM_DRAWS),
        ),
        prefixes=make_prefixes(
            num_replicas, int(drawn.chain.max(initial=-1)) + 1, drawn.block_tokens
        ),
        counts=np.array([0, 0, 0, 0, 0, 0, num_replicas, 0, 0, 0]),
        draw=np.array([seed], np.uint64),
    )


def latencies(requests: Requests) -> tuple[Floats, ...]:
    """Return times to the first token and per token after it, ms, of those measured."""
    kept = slice(int(WARM_UP_SHARE * requests.arrival_s.size), None)
    first_s, num_tokens = requests.first_token_s[kept], requests.num_output_tokens[kept]
    ttft_ms = 1e3 * (first_s - requests.arrival_s[kept])
    tpot_s = (requests.finish_s[kept] - first_s) / np.maximum(num_tokens - 1, 1)
    return ttft_ms, 1e3 * tpot_s


def measure(requests: Requests, targets: Targets) -> Metrics:
    """Summarise the requests that did not meet an empty fleet.

    Goodput is requests that kept to both targets, over the time in which those that
    are measured arrived. A reply of one token takes 0 ms a token after it. Where
    prompts share blocks, also the share of their tokens that was cached.
    """
    ttft_ms, tpot_ms = latencies(requests)
    good = (ttft_ms <= targets.ttft_ms) & (tpot_ms <= targets.tpot_ms)
    span_s = requests.arrival_s[-1] - requests.arrival_s[-good.size]
    metrics = {
        "goodput_per_s": good.sum() / span_s,
        "attainment": good.mean(),
        "ttft_p50_ms": np.quantile(ttft_ms, 0.5),
        "ttft_p99_ms": np.quantile(ttft_ms, 0.99),
        "tpot_p50_ms": np.quantile(tpot_ms, 0.5),
        "tpot_p99_ms": np.quantile(tpot_ms, 0.99),
    }
    if requests.chain.size:
        prompts = requests.num_prompt_tokens[-good.size :].sum()
        metrics["cached_share"] = requests.num_cached[-good.size :].sum() / prompts
    return {name: float(value) for name, value in metrics.items()}
