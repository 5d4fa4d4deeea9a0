"""A fleet under a load: one run, and what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from . import kernel
from .engine import Engine
from .load import Drawn

ROUTERS: Final = {
    "round-robin": kernel.ROUND_ROBIN,
    "least-requests": kernel.LEAST_REQUESTS,
    "power-of-two": kernel.POWER_OF_TWO,
}
"""Routers by name; the last two see how many requests each replica has."""

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


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Attributes:
        requests: With what became of each.
        num_steps: Of all replicas.
        num_request_steps: Requests in them, summed.
        change_s: `[2 * num_requests]`, when a request came to a replica or left it.
        change: Same shape, 1 + replica, below 0 where it left.
    """

    requests: kernel.Requests
    num_steps: int
    num_request_steps: int
    change_s: NDArray[np.float64]
    change: NDArray[np.int64]


def run_fleet(
    engine: Engine,
    drawn: Drawn,
    num_replicas: int,
    router: str,
    staleness_s: float,
    seed: int,
    on_piece: Callable[[], None] = lambda: None,
) -> Run:
    """Run a fleet until all requests are answered.

    Args:
        engine: Of every replica.
        drawn: What arrives.
        num_replicas: >= 1.
        router: One of `ROUTERS`.
        staleness_s: How old what it knows of the replicas is.
        seed: Of acceptance and of the router's draws.
        on_piece: Called `PIECES` times on the way.
    """
    count = drawn.arrival_s.size
    requests = kernel.Requests(
        *(drawn.arrival_s, drawn.num_prompt_tokens, drawn.num_output_tokens),
        kind=drawn.kind,
        replica=np.zeros(count, np.int64),
        seen=np.zeros(count, np.int64),
        first_token_s=np.full(count, np.nan),
        finish_s=np.full(count, np.nan),
        num_finishes=np.zeros(count, np.int64),
    )
    fleet = kernel.make_fleet(num_replicas, engine.costs.max_num_seqs, count, seed)
    for piece in range(1, PIECES + 1):
        kernel.advance(
            *(fleet, requests, engine.costs, engine.survival),
            *(ROUTERS[router], float(staleness_s), seed, count * piece // PIECES),
        )
        on_piece()
    steps, request_steps = (
        fleet.counts[kernel.STEPS],
        fleet.counts[kernel.REQUEST_STEPS],
    )
    return Run(requests, int(steps), int(request_steps), fleet.change_s, fleet.change)


def measure(requests: kernel.Requests, targets: Targets) -> Metrics:
    """Summarise the requests that did not meet an empty fleet.

    Goodput is requests that kept to both targets, over the time in which those that
    are measured arrived. A reply of one token takes 0 ms a token after it.
    """
    kept = slice(int(WARM_UP_SHARE * requests.arrival_s.size), None)
    arrival_s, finish_s = requests.arrival_s[kept], requests.finish_s[kept]
    first_s, num_tokens = requests.first_token_s[kept], requests.num_output_tokens[kept]
    ttft_ms = 1e3 * (first_s - arrival_s)
    tpot_ms = 1e3 * (finish_s - first_s) / np.maximum(num_tokens - 1, 1)
    good = (ttft_ms <= targets.ttft_ms) & (tpot_ms <= targets.tpot_ms)
    span_s = arrival_s[-1] - arrival_s[0]
    metrics = {
        "goodput_per_s": good.sum() / span_s,
        "attainment": good.mean(),
        "ttft_p50_ms": np.quantile(ttft_ms, 0.5),
        "ttft_p99_ms": np.quantile(ttft_ms, 0.99),
        "tpot_p50_ms": np.quantile(tpot_ms, 0.5),
        "tpot_p99_ms": np.quantile(tpot_ms, 0.99),
    }
    return {name: float(value) for name, value in metrics.items()}
