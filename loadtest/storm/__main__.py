"""Run a storm: `python -m loadtest.storm --output DIR`."""

import argparse
import asyncio
import itertools
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.compare.arms import parse_arm
from loadtest.compare.deployment import Deployment, Launcher
from loadtest.compare.processes import HOST, VICTIMS
from loadtest.compare.scrape import scrape
from loadtest.environment import describe_run
from loadtest.experiment import BenchFolder
from loadtest.interrupts import interruptible

from .cases import make_cases
from .hosts import Hosts
from .judge import Judge, describe_stalls
from .killer import kill_in_turn
from .streams import run_streams

_FLEET = (
    *("replicas.min=2", "replicas.max=2", "http.fronts.min=2", "http.fronts.max=2"),
    "engine.dtype=float32",
)
_say = partial(print, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run it; the status is 1 if a stream failed or was corrupted."""
    options = _parse(arguments)
    folder = BenchFolder(options.output)
    settings = [*_FLEET, *options.set]
    logs, has_hosts = options.output / "logs", HOST in options.kills
    hosts = Hosts(logs, options.config, settings) if has_hosts else None
    fleet = hosts or Launcher(logs, options.config, settings)
    try:
        with interruptible(), fleet.run(parse_arm(options.policy), _say) as deployment:
            results = asyncio.run(_play(options, deployment, hosts))
    except LoadTestError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("stopped; nothing is kept")
        return 130
    folder.write_json("results.json", results)
    streams = results["streams"]
    _say(f"streams: {streams}; replays: {results['replays']}")
    for kind, stall in results["stalls"].items():
        _say(f"still after {kind}: {stall}")
    _say(f"results are in {options.output}")
    return int(bool(streams.get("failed") or streams.get("corrupted")))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.storm",
        description="Starts a deployment of two fronts and two replicas, notes the "
        "answers to a set of requests, then asks again and again while one process "
        "after another is killed, and compares. In float32 and at temperature 0 every "
        "token has to be the same.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="for results.json")
    add("--config", default="configs/tiny.yaml", help="deployment file")
    add("--policy", default="goodput:8", help="e.g. none, fixed:3, goodput:8")
    add("--set", action="append", default=[], help="e.g. http.fronts.max=3")
    add("--in-flight", type=int, default=16, help="streams at a time")
    add("--streams", type=int, default=1000, help="fewest in all")
    add("--prompts", type=int, default=63, help="different requests")
    add(
        "--kills",
        nargs="+",
        choices=VICTIMS,
        help="default: all but host, for which two hosts are made, as root",
    )
    parser.set_defaults(kills=[kind for kind in VICTIMS if kind != HOST])
    add("--each", type=int, default=10, help="kills of each kind")
    add("--seed", type=int, default=0, help="of victims and moments")
    return parser.parse_args(arguments)


async def _play(
    options: argparse.Namespace, deployment: Deployment, hosts: Hosts | None
) -> dict[str, Any]:
    endpoint, kinds = deployment.endpoint, options.kills * options.each
    cases = make_cases(options.prompts)
    server = endpoint.url, endpoint.find_model()
    ask = partial(run_streams, *server)
    _say(f"noting the answers to {len(cases)} requests")
    # Twice: what is compiled on the way must not be what is compared with.
    for _ in range(2):
        undisturbed = await ask(cases, options.in_flight)
    broken = [one.error for one in undisturbed if not one.is_whole]
    if broken:
        raise LoadTestError(f"{len(broken)} fail undisturbed, e.g. {broken[0]}")
    began_s = time.monotonic()
    # Often: what dies takes its counts along.
    with scrape(deployment, looks_per_page=1) as seen:
        killing = asyncio.create_task(
            kill_in_turn(deployment, kinds, options.seed, _say, hosts)
        )
        numbered = enumerate(itertools.cycle(cases))
        asked = itertools.takewhile(
            lambda one: one[0] < options.streams or not killing.done(), numbered
        )
        streams = await ask((case for _, case in asked), options.in_flight)
        kills = await killing
        lasted_s = time.monotonic() - began_s
    judge = Judge(*server, undisturbed, may_cut="front" in options.kills)
    for stream in streams:
        await asyncio.to_thread(judge.judge, stream)
    return {
        "requests": len(streams),
        "streams": dict(judge.counts),
        "kinds": dict(Counter(stream.case.kind for stream in streams)),
        "examples": judge.examples,
        "replays": seen.counters.get("tetris_replays_total", 0),
        "tokens_recomputed": seen.counters.get("tetris_replayed_tokens_total", 0),
        "stalls": describe_stalls(streams, kills),
        "kills": [one | {"at_s": round(one["at_s"] - began_s, 2)} for one in kills],
        "lasted_s": round(lasted_s, 1),
        "settings": vars(options) | {"output": str(options.output)},
        **describe_run(),
    }


if __name__ == "__main__":
    sys.exit(main())
