"""A fleet under a load: one run, and what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import kernel, routers, state
from .drawn import Drawn
from .engine import Engine

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
    """What a good request keeps to.

    Attributes:
        ttft_ms: Longest time to its first token.
        tpot_ms: Longest mean time of each token after that.
    """

    ttft_ms: float
    tpot_ms: float


class Run(NamedTuple):
    """A finished run: requests, with what became of each, and the fleet."""

    requests: state.Requests
    fleet: state.Fleet


def run_fleet(
    engine: Engine,
    drawn: Drawn,
    num_replicas: int,
    router: str,
    staleness_s: float,
    seed: int,
    slow: tuple[float, float] = (0.0, 1.0),
    on_piece: Callable[[], None] = lambda: None,
    decide: Callable[[state.Fleet, int], None] = lambda _fleet, _replica: None,
) -> Run:
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
    count, requests = drawn.arrival_s.size, make_requests(drawn)
    fleet = state.make_fleet(
        *(num_replicas, engine.costs.max_num_seqs, count, seed),
        *(int(drawn.chain.max(initial=-1)) + 1, drawn.block_tokens),
    )
    share, times = slow
    fleet.slowness[: round(share * num_replicas)] = times
    fixed = fleet, requests, engine.drafts, engine.costs
    how = (ROUTERS | PREFIX_ROUTERS)[router], float(staleness_s), seed
    for piece in range(1, PIECES + 1):
        until = count * piece // PIECES
        while (asked := kernel.advance(*fixed, *how, until, np.inf)) >= 0:
            decide(fleet, asked)
        on_piece()
    return Run(requests, fleet)


def make_requests(drawn: Drawn) -> state.Requests:
    """Return requests of which nothing has come yet."""
    count = drawn.arrival_s.size
    has_chains = drawn.chain_first.size > 0
    return state.Requests(
        *(drawn.arrival_s, drawn.num_prompt_tokens, drawn.num_output_tokens),
        kind=drawn.kind,
        replica=np.zeros(count, np.int64),
        seen=np.zeros(count, np.int64),
        first_token_s=np.full(count, np.nan),
        finish_s=np.full(count, np.nan),
        num_finishes=np.zeros(count, np.int64),
        num_emitted=np.zeros(count, np.int64),
        resumed_s=np.full(count, np.nan),
        num_cached=np.zeros(count, np.int64),
        chain=drawn.chain,
        chain_first=drawn.chain_first if has_chains else np.zeros(count + 1, np.int64),
    )


def latencies(requests: state.Requests) -> tuple[NDArray[np.float64], ...]:
    """Return times to the first token and per token after it, ms, of those measured."""
    kept = slice(int(WARM_UP_SHARE * requests.arrival_s.size), None)
    first_s, num_tokens = requests.first_token_s[kept], requests.num_output_tokens[kept]
    ttft_ms = 1e3 * (first_s - requests.arrival_s[kept])
    tpot_s = (requests.finish_s[kept] - first_s) / np.maximum(num_tokens - 1, 1)
    return ttft_ms, 1e3 * tpot_s


def measure(requests: state.Requests, targets: Targets) -> Metrics:
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
