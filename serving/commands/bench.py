"""Commands that are installed beside the server: `bench WHAT`, and others by name."""

import argparse
import functools
import re
import sys
from collections.abc import Iterator
from importlib.metadata import (
    EntryPoint,
    PackageNotFoundError,
    entry_points,
    requires,
    version,
)
from typing import Any, Final

BENCHMARKS: Final = "tetris_serve.benchmarks"
"""Entry points `name = "module:main"`, called with the arguments and a program name."""

COMMANDS: Final = "tetris_serve.commands"
"""Likewise, for commands of their own."""

_EXTRA = "loadtest"
_NO_PREFIX = "\0"


def add_bench_command(commands: Any) -> None:
    """Add the commands to the program's parser.

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
        _add(kinds, benchmark, f"bench {benchmark.name}")
    for command in sorted(entry_points(group=COMMANDS)):
        _add(commands, command, command.name)


def _add(commands: Any, entry: EntryPoint, title: str) -> None:
    command = commands.add_parser(
        entry.name,
        help=f"{entry.name} --help says what it measures",
        # Options are its own business: here nothing starts with a prefix.
        prefix_chars=_NO_PREFIX,
        add_help=False,
    )
    command.add_argument("arguments", nargs="*")
    command.set_defaults(run=functools.partial(_run, entry, title))


def _run(benchmark: EntryPoint, title: str, args: argparse.Namespace) -> int:
    # Before the start: Locust is a process of its own, and plots are drawn at the end.
    main, problem = None, ", ".join(_find_missing())
    if not problem:
        try:
            main = benchmark.load()
        except ModuleNotFoundError as error:
            problem = str(error)
    if main is None:
        sys.stderr.write(
            f"error: {title} needs the extra tetris-serve[{_EXTRA}]; "
            f"missing: {problem}. In a clone, `make bench` and `make loadtest` install "
            f"it; elsewhere, pip install 'tetris-serve[{_EXTRA}]'\n"
        )
        return 1
    return int(main(args.arguments, prog=f"tetris-serve {title}"))


def _find_missing() -> Iterator[str]:
    """Yield what the extra asks for and is not installed."""
    for requirement in requires("tetris-serve") or ():
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            if f'extra == "{_EXTRA}"' in requirement:
                version(name)
        except PackageNotFoundError:
            yield name
