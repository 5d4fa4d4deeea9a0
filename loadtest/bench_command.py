"""What the command lines of all benchmarks share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from .argument_types import read_minutes
from .errors import LoadTestError
from .result_folder import ResultFolder

EXIT_FAILED = 1
EXIT_MORE_TO_DO = 3
EXIT_INTERRUPTED = 130

Presets = dict[str, dict[str, Any]]
Store = TypeVar("Store", bound=ResultFolder)


def load_presets(file: Path) -> Presets:
    """Read named values of options; `defaults` are those of all, if there are any."""
    presets: Presets = yaml.safe_load(file.read_text())
    defaults = presets.pop("defaults", {})
    return {name: defaults | own for name, own in presets.items()}


def make_parser(
    prog: str, description: str, presets: Presets | None = None
) -> argparse.ArgumentParser:
    """Build a parser with the options of every benchmark, and its presets."""
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="of the results")
    if presets:
        add("--preset", choices=presets, help="values for other options")
        parser.epilog = "presets, whose values stand where an option is not given:\n"
        parser.epilog += "\n".join(
            f"  {name:<10}{one['summary']}" for name, one in presets.items()
        )
    add(
        "--minutes",
        type=read_minutes,
        metavar="N",
        help="begin nothing new after this long; exits with 3 if work is left",
    )
    add("--restart", action="store_true", help="discard what the folder holds")
    add("--report-only", action="store_true", help="only write tables and plots anew")
    return parser


def read_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    presets: Presets,
    choose: Callable[[argparse.Namespace], str | None],
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset, if any."""
    preset = choose(parser.parse_args(arguments))
    if preset is not None:
        parser.set_defaults(**presets[preset])
    return parser.parse_args(arguments)


def run_benchmark(
    options: argparse.Namespace,
    open_folder: Callable[..., Store],
    measure: Callable[[argparse.Namespace, Store], bool],
    report: Callable[[Store], bool | None],
) -> int:
    """Run a benchmark, and explain its end.

    Args:
        options: As read by a parser of `make_parser`.
        open_folder: The class of the folder.
        measure: Measures what is missing, and returns whether that was all.
        report: Writes what is known; returns False if it is not as it should be.

    Returns:
        Exit status: 0, 1 after an error or if all is not right, 3 when `--minutes` ran
        out with work left, 130 after Ctrl-C.
    """
    try:
        store, is_right = open_folder(options.output, restart=options.restart), True
        is_complete = options.report_only or measure(options, store)
        if store.records():
            is_right = report(store) is not False
            say(f"\nresults are in {store.folder}")
        elif is_complete:
            raise LoadTestError(f"--output {store.folder} holds no measurements")
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
