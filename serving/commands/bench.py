"""`tetris-serve bench`: hands its arguments on to whatever benchmarks are installed."""

import argparse
import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

BENCHMARKS: Final = "tetris_serve.benchmarks"
"""Entry points `name = "module:main"`, called with the arguments and a program name."""

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
    for benchmark in sorted(entry_points(group=BENCHMARKS)):
        kind = kinds.add_parser(
            benchmark.name,
            help=f"{benchmark.name} --help says what it measures",
            # Options are the benchmark's own business: here nothing starts with a
            # prefix.
            prefix_chars=_NO_PREFIX,
            add_help=False,
        )
        kind.add_argument("arguments", nargs="*")
        kind.set_defaults(run=functools.partial(_run, benchmark))


def _run(benchmark: EntryPoint, args: argparse.Namespace) -> int:
    try:
        main = benchmark.load()
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: bench {benchmark.name} cannot start: {error}; run the set-up "
            "again, or install what is missing\n"
        )
        return 1
    return int(main(args.arguments, prog=f"tetris-serve bench {benchmark.name}"))
