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
    for name, where, run in (
        ("engine", "on the real engine, offline", _bench_engine),
        ("http", "over HTTP, under load", _bench_http),
    ):
        kind = kinds.add_parser(
            name,
            help=f"{where} ({name} --help lists the options)",
            # Options are the benchmark's own business: here nothing starts with a
            # prefix.
            prefix_chars=_NO_PREFIX,
            add_help=False,
        )
        kind.add_argument("arguments", nargs="*")
        kind.set_defaults(run=run)


def _bench_engine(args: argparse.Namespace) -> int:
    # Only here, because serving does without loadtest.
    from loadtest.engine_bench.cli import main

    return main(args.arguments, prog="tetris-serve bench engine")


def _bench_http(args: argparse.Namespace) -> int:
    from loadtest.http_bench.cli import main

    return main(args.arguments, prog="tetris-serve bench http")
