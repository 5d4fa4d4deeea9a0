"""Command line: ``tetris-serve bench slo --help``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadtest.argument_types import read_positive
from loadtest.bench_command import make_parser, run_command, say
from loadtest.client.errors import LoadTestError
from loadtest.engine.cli import add_pair, find_pair
from loadtest.engine.workloads import RequestMaker

from .plan import DEFAULTS, PRESETS, make_plan
from .report import write_report
from .run import Bench, Store


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench slo"
) -> int:
    """Run the benchmark; the status is that of `run_command`."""
    options = parse(arguments, prog)
    return run_command(lambda: (_run(options), True))


def _run(options: argparse.Namespace) -> bool:
    store = Store(options.output)
    is_complete = options.report_only or _measure(options, store)
    write_report(store)
    say(f"\nresults are in {options.output}")
    return is_complete


def _measure(options: argparse.Namespace, store: Store) -> bool:
    if find_pair(options) is not None:
        raise LoadTestError("--device gpu: all arms have an engine at once; use cpu")
    plan = make_plan(options)
    longest = max(kind.max_tokens for kind in plan.kinds.values())
    requests = RequestMaker.load(options.target, options.seed, longest)
    if options.restart:
        store.clear()
    return Bench(plan, store, requests).measure(options.minutes)


def parse(
    arguments: Sequence[str] | None, prog: str = "tetris-serve bench slo"
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset."""
    parser = _make_parser(prog)
    preset = parser.parse_args(arguments).preset or "smollm2"
    values = DEFAULTS | PRESETS[preset]
    pair = {role: Path(values.pop(role)) for role in ("target", "draft")}
    parser.set_defaults(**values, **pair)
    return parser.parse_args(arguments)


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = make_parser(
        prog,
        "Measure who keeps the time per token of its class, against load: two classes "
        "of\nrequests come as a Poisson process to engines that are told of them or "
        "not.\nInterrupted, the same command goes on where it was. Without --preset "
        "it is smollm2.",
        PRESETS,
    )
    add = parser.add_argument
    add(
        "--arms",
        metavar="LIST",
        help="as policies of `bench engine`; NAME@priority has vLLM's priorities by "
        "class, NAME@classes weights and targets too; the last is compared with others",
    )
    add("--loads", metavar="LIST", help="arrivals as shares of the capacity, e.g. .5,1")
    add("--rounds", type=read_positive, metavar="N", help="each on engines anew")
    add("--blocks", type=read_positive, metavar="N", help="of each load in a round")
    add(
        "--block-s",
        type=float,
        metavar="S",
        help="time in which a block's requests come",
    )
    add_pair(parser, PRESETS["smollm2"]["target"], PRESETS["smollm2"]["draft"])
    return parser
