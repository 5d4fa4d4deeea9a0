"""What the command lines of both benchmarks share."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .argument_types import read_minutes
from .client.errors import LoadTestError

EXIT_FAILED = 1
EXIT_MORE_TO_DO = 3
EXIT_INTERRUPTED = 130


def make_parser(
    prog: str, description: str, presets: Mapping[str, Mapping[str, Any]]
) -> argparse.ArgumentParser:
    """Build a parser with the options of every benchmark, and its presets."""
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        epilog="presets, whose values stand where an option is not given:\n"
        + "\n".join(f"  {name:<10}{one['summary']}" for name, one in presets.items()),
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="of the results")
    add("--preset", choices=presets, help="values for other options")
    add(
        "--minutes",
        type=read_minutes,
        metavar="N",
        help="begin nothing new after this long; exits with 3 if work is left",
    )
    add("--restart", action="store_true", help="discard what the folder holds")
    return parser


def run_command(run: Callable[[], tuple[bool, bool]]) -> int:
    """Run a benchmark, and explain its end.

    Args:
        run: Returns whether everything is measured, and whether that is all right.

    Returns:
        Exit status: 0, 1 after an error or if all is not right, 3 when `--minutes` ran
        out with work left, 130 after Ctrl-C.
    """
    try:
        is_complete, is_right = run()
    except KeyboardInterrupt:
        say("\nstopped; what is finished is kept, the same command goes on from there")
        return EXIT_INTERRUPTED
    except LoadTestError as error:
        say(f"\nerror: {error}")
        return EXIT_FAILED
    if not is_complete:
        say("not everything is measured yet: run the same command again")
        return EXIT_MORE_TO_DO
    return 0 if is_right else EXIT_FAILED


def say(line: str) -> None:
    """Write a line for the user."""
    sys.stderr.write(f"{line}\n")
