"""Microseconds of a routing decision: `python -m loadtest.simulate.timing`.

Processor time of this process, which a busy machine makes longer by its cold caches.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

from policies.compiled import compiled
from policies.decisions.routing import Candidate, ReplicaLoad, choose_replica

from .engine import find_model, load_engine
from .fleet import ROUTERS, make_requests
from .load import Drawn
from .routers import route
from .state import Costs, Fleet, Requests, make_fleet

REPLICAS = (1, 64, 1000)
FRONT = "a-front"


@compiled
def _route_all(fleet: Fleet, requests: Requests, costs: Costs, router: int) -> None:
    for request in range(requests.arrival_s.size):
        route(fleet, requests, costs, request, 0.1, router)


def main(num_decisions: int = 20_000) -> int:
    """Print each compiled router's time, and that of the same decision in a front."""
    names = [*ROUTERS, FRONT]
    lines = ["replicas  " + "  ".join(names)]
    for count in REPLICAS:
        cells = [
            _time_front(count, num_decisions)
            if name == FRONT
            else _time_router(name, count, num_decisions)
            for name in names
        ]
        row = [
            f"{cell:.2f}".rjust(len(n)) for cell, n in zip(cells, names, strict=True)
        ]
        lines.append(f"{count}".ljust(10) + "  ".join(row))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _time_router(name: str, num_replicas: int, num_decisions: int) -> float:
    """Return microseconds; requests come and none leaves, as seats for all allow."""
    costs = load_engine(find_model("h100-qwen3-1.7b"), 3).costs
    costs = costs._replace(max_num_seqs=num_decisions)
    ones = np.ones(num_decisions, np.int64)
    drawn = Drawn(np.linspace(0, 2, num_decisions), 300 * ones, 200 * ones, 0 * ones)
    took_s = 0.0
    for _ in range(2):  # The first time compiles.
        # Slots are of the engine, and there is none.
        fleet = make_fleet(num_replicas, 1, num_decisions, 0)
        requests = make_requests(drawn)
        began_s = time.process_time()
        _route_all(fleet, requests, costs, ROUTERS[name])
        took_s = time.process_time() - began_s
    return 1e6 * took_s / num_decisions


def _time_front(num_replicas: int, num_decisions: int) -> float:
    """Return microseconds of the live decision, its telemetry at hand."""
    load = ReplicaLoad(10.0, 1.0, 0.1, 2.0, 4)
    draw = random.Random(0).random
    began_s = 0.0
    for number in range(num_decisions + 1):  # The first one compiles.
        choose_replica(
            *(num_replicas, lambda _index: Candidate(load), draw),
            num_prompt_tokens=300,
            num_reply_tokens=200.0,
        )
        began_s = began_s if number else time.process_time()
    return 1e6 * (time.process_time() - began_s) / num_decisions


if __name__ == "__main__":
    sys.exit(main())
