"""What keeping tokens for replays costs a front.

    python -m tests.front.measure_replay

Whole servers differ by a quarter from start to start on two cores, and two with and
without replay could not be told apart. So this takes the one thing that is done for
replays in every step, in the front's own code, in turn with requests that keep nothing.
"""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import stats

from loadtest.environment import describe_machine, describe_versions
from serving.engine.compat import EngineCoreOutput, EngineCoreOutputs
from serving.front.fleet_client import FleetClient
from serving.front.in_flight import InFlight, Lease
from serving.replica.kinship import Kin
from tests.front.fake_fleet import make_request

FILE = Path(__file__).parents[2] / "loadtest/results/front-cpu/replay/results.json"
NUM_REQS, NUM_STEPS, NUM_ROUNDS = 16, 400, 60


class KeepsNothing(list[int]):
    """Takes tokens, and forgets them."""

    def extend(self, _: Any) -> None:
        """Do nothing."""


async def measure() -> dict[str, Any]:
    """Return CPU nanoseconds a token of a front's `_take_step`, both ways."""
    client = FleetClient(
        front=b"f", kin=Kin("x", 1), supported_tasks=("generate",), open_stream=print
    )
    link: Any = SimpleNamespace(load=SimpleNamespace(num_held=0))
    found: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * NUM_ROUNDS):
        way = ("on", "off")[(number + number // 2) % 2]
        names = [f"{way}-{number}-{n}" for n in range(NUM_REQS)]
        for name in names:
            one = InFlight(make_request(name))
            if way == "off":
                one.emitted = KeepsNothing()
            Lease(one, "", link=link).hand_to(one)
            client._requests.add(one)
        steps = [
            EngineCoreOutputs(outputs=[EngineCoreOutput(n, [7]) for n in names])
            for _ in range(NUM_STEPS)
        ]
        began_ns = time.thread_time_ns()
        for step in steps:
            client._take_step(link, step)
        spent_ns = time.thread_time_ns() - began_ns
        found[way].append(spent_ns / (NUM_STEPS * NUM_REQS))
        for name in names:
            one = client._requests.pop(name)
            assert one is not None
            assert len(one.emitted) == (NUM_STEPS if way == "on" else 0)
        assert client._outputs.qsize() == NUM_STEPS
        while not client._outputs.empty():
            client._outputs.get_nowait()
    client.shutdown()
    added = np.array(found["on"]) - np.array(found["off"])
    half = stats.t.ppf(0.975, added.size - 1) * stats.sem(added)
    return {
        "ns_per_token_on": round(float(np.median(found["on"])), 1),
        "ns_per_token_off": round(float(np.median(found["off"])), 1),
        "added_ns": round(float(added.mean()), 1),
        "added_ns_high": round(float(added.mean() + half), 1),
        "rounds": NUM_ROUNDS,
        "machine": describe_machine(None),
        "versions": describe_versions(),
    }


if __name__ == "__main__":
    results = asyncio.run(measure())
    FILE.write_text(json.dumps(results, indent=1) + "\n")
