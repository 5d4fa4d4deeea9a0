"""Run a storm: `python -m loadtest.storm --output DIR`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.compare.arms import parse_arm
from loadtest.compare.deployment import Deployment, Launcher
from loadtest.compare.scrape import GrowingCounters, read_page
from loadtest.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
)

from .cases import make_cases
from .judge import Judge, describe_stalls
from .killer import ROLES, Killer
from .streams import Stream, open_session, run_in_turn, run_stream

_COUNT_PERIOD_S = 4.0


def main(arguments: list[str] | None = None) -> int:
    """Run it; the status is 1 if a stream failed or was corrupted."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        results = _run(options)
    except LoadTestError as error:
        _say(f"error: {error}")
        return 2
    text = json.dumps(results, indent=1) + "\n"
    (options.output / "results.json").write_text(text)
    streams = results["streams"]
    _say(f"streams: {streams}; replays: {results['replays']}")
    for kind, stall in results["stalls"].items():
        _say(f"still after {kind}: {stall}")
    _say(f"results are in {options.output}")
    return int(bool(streams.get("failed") or streams.get("corrupted")))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.storm",
        description="Starts a deployment, notes the answers to a set of requests, then "
        "asks again and again while one process after another is killed, and compares. "
        "In float32 and at temperature 0 every token has to be the same.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="for results.json")
    add("--config", default="configs/tiny.yaml", help="deployment file")
    add("--policy", default="goodput:8", help="e.g. none, fixed:3, goodput:8")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    add("--replicas", type=int, default=2)
    add("--fronts", type=int, default=2)
    add("--in-flight", type=int, default=16, help="streams at a time")
    add("--streams", type=int, default=1000, help="fewest in all")
    add("--prompts", type=int, default=63, help="different requests")
    add("--kills", default="engine,replica,front", help=f"of {', '.join(ROLES)}")
    add("--each", type=int, default=10, help="kills of each kind")
    add("--seed", type=int, default=0, help="of victims and moments")
    options = parser.parse_args(arguments)
    options.kills = [kind for kind in options.kills.split(",") if kind]
    unknown = set(options.kills) - ROLES.keys()
    if unknown:
        parser.error(f"--kills: {min(unknown)} is none of {', '.join(ROLES)}")
    return options


def _run(options: argparse.Namespace) -> dict[str, Any]:
    counts = {"replicas": options.replicas, "http.fronts": options.fronts}
    settings = [
        f"{where}.{bound}={count}"
        for where, count in counts.items()
        for bound in ("min", "max")
    ]
    settings += ["engine.dtype=float32", *options.settings]
    launcher = Launcher(options.output / "logs", options.config, settings)
    with launcher.run(parse_arm(options.policy), _say) as deployment:
        return asyncio.run(_play(options, deployment))


async def _play(options: argparse.Namespace, deployment: Deployment) -> dict[str, Any]:
    url = deployment.endpoint.url
    model = json.loads(deployment.endpoint.fetch("/v1/models") or "")["data"][0]["id"]
    cases = make_cases(options.prompts)
    _say(f"noting the answers to {len(cases)} requests")
    # Twice: what is compiled on the way must not be what is compared with.
    for _ in range(2):
        undisturbed = await run_in_turn(url, model, cases, options.in_flight)
    broken = [one.error for one in undisturbed if not one.is_whole]
    if broken:
        raise LoadTestError(f"{len(broken)} fail undisturbed, e.g. {broken[0]}")
    judge = Judge(url, model, undisturbed, may_cut="front" in options.kills)
    killer = Killer(
        deployment, options.kills, options.each, seed=options.seed, say=_say
    )
    counters = GrowingCounters()
    counting = asyncio.create_task(_keep_counting(deployment, counters))
    began_s = time.monotonic()
    streams = await _storm(options, url, model, killer)
    lasted_s = time.monotonic() - began_s
    await asyncio.sleep(deployment.settle_s + _COUNT_PERIOD_S)
    counting.cancel()
    verdict = await asyncio.to_thread(judge.judge, streams)
    return {
        "requests": len(streams),
        "streams": dict(verdict.counts),
        "kinds": _count_kinds(streams),
        "examples": verdict.examples,
        "replays": counters.totals.get("tetris_replays_total", 0),
        "tokens_recomputed": counters.totals.get("tetris_replayed_tokens_total", 0),
        "stalls": describe_stalls(streams, killer.kills),
        "kills": [
            one | {"at_s": round(one["at_s"] - began_s, 2)} for one in killer.kills
        ],
        "lasted_s": round(lasted_s, 1),
        "settings": {
            name: getattr(options, name)
            for name in ("policy", "replicas", "fronts", "in_flight", "prompts", "seed")
        },
        "machine": describe_machine(),
        "versions": describe_versions(),
        **describe_piece(),
    }


async def _storm(
    options: argparse.Namespace, url: str, model: str, killer: Killer
) -> list[Stream]:
    """Stream until everything was killed and enough was asked."""
    streams: list[Stream] = []
    num_sent = 0
    cases = make_cases(options.prompts)
    killing = asyncio.create_task(killer.run())
    async with open_session(options.in_flight) as session:

        async def work() -> None:
            nonlocal num_sent
            while not killing.done() or num_sent < options.streams:
                case = cases[num_sent % len(cases)]
                num_sent += 1
                streams.append(await run_stream(session, url, model, case))

        await asyncio.gather(*(work() for _ in range(options.in_flight)))
    await killing
    return streams


async def _keep_counting(deployment: Deployment, counters: GrowingCounters) -> None:
    """Follow what fronts count, for those that die take their counts along."""
    while True:
        for page in deployment.metrics_urls:
            text = await asyncio.to_thread(deployment.endpoint.fetch, page)
            if text is not None:
                counters.update(read_page(text)[0])
        await asyncio.sleep(_COUNT_PERIOD_S)


def _count_kinds(streams: list[Stream]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for stream in streams:
        kinds[stream.case.kind] = kinds.get(stream.case.kind, 0) + 1
    return kinds


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


if __name__ == "__main__":
    sys.exit(main())
