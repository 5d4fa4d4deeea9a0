"""`tetris-serve bench`: hands its arguments on to the benchmarks in `loadtest`."""

import argparse
from typing import Any

_NO_PREFIX = "\0"


def add_bench_command(commands: Any) -> None:
    """Add the command to the program's parser.

    Args:
        commands: What `add_subparsers` returned.
    """
    bench = commands.add_parser(
        "bench",
        help="measure policies against each other",
        description="Measure policies against each other.",
    )
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    engine = kinds.add_parser(
        "engine",
        help="on the real engine, offline (engine --help lists the options)",
        # Options are the benchmark's own business: here nothing starts with a prefix.
        prefix_chars=_NO_PREFIX,
        add_help=False,
    )
    engine.add_argument("arguments", nargs="*")
    engine.set_defaults(run=_bench_engine)


def _bench_engine(args: argparse.Namespace) -> int:
    # Only here, because serving does without loadtest.
    from loadtest.engine_bench.cli import main

    return main(args.arguments, prog="tetris-serve bench engine")
