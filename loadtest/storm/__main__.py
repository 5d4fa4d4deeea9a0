"""Run a storm: `python -m loadtest.storm --output DIR`."""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from loadtest.argument_types import read_positive
from loadtest.compare.arms import parse_arm
from loadtest.compare.deployment import Deployment, Launcher, find_config
from loadtest.compare.processes import HOST, VICTIMS
from loadtest.compare.scrape import scrape
from loadtest.environment import describe_run
from loadtest.errors import LoadTestError
from loadtest.interrupts import interruptible
from loadtest.result_folder import ResultFolder

from .cases import make_cases
from .changes import CHANGES
from .hosts import Hosts
from .judge import Judge, describe_stalls, describe_timeline
from .killer import kill_in_turn
from .law import draw_next, find_replayed, find_target, judge_law
from .replays import find_logs, read_replays
from .report import write_report
from .streams import run_streams

_FLEET = ("http.fronts.min=2", "http.fronts.max=2", "engine.dtype=float32")
_say = partial(print, flush=True)

_FEW: Final = 50
"""Replayed streams, of which about one in five is sampled."""

_MOST: Final = 0.9


def main(arguments: list[str] | None = None) -> int:
    """Run it; the status is 1 if a stream failed or was wrong, or if it broke off."""
    options = _parse(arguments)
    folder = ResultFolder(options.output)
    num = options.replicas
    settings = [*_FLEET, f"replicas.min={num}", f"replicas.max={num}", *options.set]
    logs = options.output / "logs"
    has_hosts = not {HOST, *CHANGES}.isdisjoint(options.kills)
    hosts = Hosts(logs, options.config, settings, num) if has_hosts else None
    fleet = hosts or Launcher(logs, options.config, settings)
    try:
        if folder.read_json("results.json") is not None:
            raise LoadTestError(f"--output {options.output} holds a storm already")
        with interruptible(), fleet.run(parse_arm(options.policy), _say) as deployment:
            results = asyncio.run(_play(options, deployment, hosts, folder))
            folder.write_json("results.json", results)
        write_report(results, options.output)
    except LoadTestError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("stopped; what is not written by now is lost")
        return 130
    streams = results["streams"]
    _say(f"streams: {streams}; {results['replayed_streams']} of them were replayed")
    for kind, stalls in results["stalls"].items():
        for of, stall in stalls.items():
            _say(f"still after {kind}, {of}: {stall}")
    _say(f"law of replayed streams at temperature 1: {results['law']}")
    if results["incomplete"]:
        _say(f"incomplete: {results['incomplete']}")
    _say(f"results are in {options.output}")
    bad = streams.get("failed"), streams.get("corrupted"), results["incomplete"]
    return int(any(bad) or not is_shown(results))


def is_shown(results: Mapping[str, Any]) -> bool:
    """Tell whether the law of replayed streams holds, and could have been found not to.

    A few replays say nothing of it, and need not.
    """
    law, replayed = results["law"], results["replayed_streams"]
    if replayed == 0:
        return not results["replays"]
    if replayed < _FEW:
        return bool(law.get("holds", True))
    # Else cuts were not where they were taken to be.
    are_found = law.get("as_derived", 0) >= _MOST * law.get("streams", 1)
    return bool(law.get("holds") and law["control_fails"] and are_found)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.storm",
        description="Starts a deployment of two fronts and some replicas, notes the "
        "answers to a set of requests, then asks again and again while one process "
        "after another is killed, or the fleet is changed, and compares. In float32 "
        "and at temperature 0 every token has to be the same, and so must usage, "
        "finish reasons and log probabilities; at temperature 1 tokens have to follow "
        "the model's law.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    add("--config", default="configs/tiny.yaml", help="deployment file")
    add("--policy", default="goodput:8", help="e.g. none, fixed:3, goodput:8")
    add("--replicas", type=read_positive, default=2, metavar="N", help="default: 2")
    add("--set", action="append", default=[], help="e.g. http.fronts.max=3")
    add("--in-flight", type=int, default=32, help="streams at a time")
    add("--streams", type=int, default=1000, help="fewest in all")
    add("--prompts", type=int, default=63, help="different requests")
    add(
        "--kills",
        nargs="+",
        choices=[*VICTIMS, *CHANGES],
        help="default: engine, replica and front. The others take two hosts, which are "
        "made, as root: the death of one; a redeployment with another setting, a "
        "drain of one of them, and one replica less and then as many again",
    )
    parser.set_defaults(kills=[kind for kind in VICTIMS if kind != HOST])
    add("--each", type=int, default=14, help="kills of each kind")
    add("--seed", type=int, default=0, help="of victims and moments")
    return parser.parse_args(arguments)


async def _play(
    options: argparse.Namespace,
    deployment: Deployment,
    hosts: Hosts | None,
    folder: ResultFolder,
) -> dict[str, Any]:
    endpoint, kinds = deployment.endpoint, options.kills * options.each
    assert deployment.pid is not None  # We have started it.
    logs = find_logs(deployment.pid)
    cases = make_cases(options.prompts)
    server = endpoint.url, endpoint.find_model()
    ask = partial(run_streams, *server)
    _say(f"noting the answers to {len(cases)} requests")
    # Twice: what is compiled on the way must not be what is compared with.
    for noted in (cases, [case.with_ties() for case in cases]):
        undisturbed = await ask(noted, options.in_flight)
        broken = [one.error for one in undisturbed if not one.is_whole]
        if broken:
            raise LoadTestError(f"{len(broken)} fail undisturbed, e.g. {broken[0]}")
    began_s, kills = time.monotonic(), list[dict[str, Any]]()
    # Often: what dies takes its counts along.
    with scrape(deployment, looks_per_page=1) as seen:
        killing = asyncio.create_task(
            kill_in_turn(deployment, kinds, options.seed, _say, kills, hosts)
        )
        numbered = enumerate(itertools.cycle(cases))
        asked = itertools.takewhile(
            lambda one: one[0] < options.streams or not killing.done(), numbered
        )
        streams = await ask((case for _, case in asked), options.in_flight)
        # What there is by then counts, whatever ended the killing.
        (problem,) = await asyncio.gather(killing, return_exceptions=True)
        lasted_s = time.monotonic() - began_s
    replays = read_replays(logs)
    kept = [
        one.record(began_s) | {"replays": replays.get(one.request_id)}
        for one in (*undisturbed, *streams)
    ]
    folder.write("streams.jsonl", "".join(f"{json.dumps(one)}\n" for one in kept))
    front_kills_s = [one["at_s"] for one in kills if one["kind"] == "front"]
    judge = Judge(undisturbed, front_kills_s)
    for stream in streams:
        judge.judge(stream)
    law: dict[str, Any] = {}
    try:
        law = await asyncio.to_thread(
            judge_law,
            find_replayed(streams, kills, replays),
            partial(draw_next, *server),
            find_target(find_config(options.config)),
        )
    except Exception as error:
        problem = problem or error
    return {
        "requests": len(streams),
        "streams": dict(judge.counts),
        "replayed_streams": sum(replays.get(one.request_id, 0) > 0 for one in streams),
        "incomplete": None if problem is None else str(problem) or repr(problem),
        "kinds": dict(Counter(stream.case.kind for stream in streams)),
        "examples": judge.examples,
        "law": law,
        "replays": seen.counters.get("tetris_replays_total", 0),
        "tokens_recomputed": seen.counters.get("tetris_replayed_tokens_total", 0),
        "stalls": describe_stalls(streams, kills, replays),
        "kills": [one | {"at_s": round(one["at_s"] - began_s, 2)} for one in kills],
        "lasted_s": round(lasted_s, 1),
        "timeline": describe_timeline(streams, began_s),
        "settings": {k: v for k, v in vars(options).items() if k != "output"},
        **describe_run(),
    }


if __name__ == "__main__":
    sys.exit(main())
