"""Command line: ``tetris-serve bench slo --help``."""

import argparse
from collections.abc import Sequence

from loadtest.argument_types import each, read_positive
from loadtest.bench_command import make_parser, read_options, run_benchmark
from loadtest.engine.cli import add_pair, find_pair_on_cpu
from loadtest.engine.workloads import RequestMaker

from .plan import PRESETS, make_plan, parse_class_arm
from .report import write_report
from .run import Bench, Store


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench slo"
) -> int:
    """Run the benchmark; the status is that of `run_benchmark`."""
    return run_benchmark(parse(arguments, prog), Store, _measure, write_report)


def _measure(options: argparse.Namespace, store: Store) -> bool:
    find_pair_on_cpu(options)
    plan = make_plan(options)
    longest = max(kind.max_tokens for kind in plan.kinds.values())
    requests = RequestMaker.load(options.target, options.seed, longest)
    return Bench(plan, store, requests).measure(options.minutes)


def parse(
    arguments: Sequence[str] | None, prog: str = "tetris-serve bench slo"
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset."""
    parser = make_parser(
        prog,
        "Measure who keeps the time per token of its class, against load: two classes "
        "of\nrequests come as a Poisson process to engines that are told of them or "
        "not.\nInterrupted, the same command goes on where it was. Without --preset "
        "it is smollm2.",
        PRESETS,
    )
    parser.set_defaults(preset="smollm2")
    add = parser.add_argument
    add(
        "--arms",
        type=each(parse_class_arm),
        metavar="LIST",
        help="as policies of `bench engine`; NAME@priority has vLLM's priorities by "
        "class, NAME@classes weights and targets too; the last is compared with others",
    )
    add(
        "--loads",
        type=each(float),
        metavar="LIST",
        help="arrivals as shares of the capacity, e.g. .5,1",
    )
    add("--rounds", type=read_positive, metavar="N", help="each on engines anew")
    add("--blocks", type=read_positive, metavar="N", help="of each load in a round")
    add(
        "--block-s",
        type=float,
        metavar="S",
        help="time in which a block's requests come",
    )
    add_pair(parser, PRESETS["smollm2"]["target"], PRESETS["smollm2"]["draft"])
    return read_options(parser, arguments, PRESETS, lambda given: given.preset)
