"""Compare an audit with what it is about: `python -m loadtest.audit --help`."""

import argparse
import sys
from collections.abc import Sequence

from loadtest.argument_types import one
from loadtest.bench_command import make_parser, run_benchmark, say
from loadtest.engine.cli import add_pair, find_pair_on_cpu
from loadtest.engine.plan import parse_bench_arm
from loadtest.engine.workloads import RequestMaker
from loadtest.environment import REPO
from loadtest.models.recipe import DRAFT_DIR, TARGET_DIR
from loadtest.result_folder import ResultFolder

from .cells import WAYS, Bench, write_untrained
from .engine import AUDITED, HELD
from .show import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that are not in the folder yet."""
    return run_benchmark(_parse(arguments), ResultFolder, _measure, _report)


def _measure(options: argparse.Namespace, folder: ResultFolder) -> bool:
    find_pair_on_cpu(options)
    if options.untrained:
        options.draft = write_untrained(options.draft, REPO / ".cache")
    requests = RequestMaker.load(options.target, options.seed, options.max_tokens)
    return Bench(options, folder, requests).measure(options.minutes)


def _report(folder: ResultFolder) -> None:
    text = render(folder.records())
    folder.write("results.md", text)
    say(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "python -m loadtest.audit",
        "Run the same requests under a policy with its audit, under the policy by "
        "itself, at\ndepth 0 in the same engine, and in an engine without a drafter, "
        "there and back,\nblock by block. What the audit says is held against what "
        "these show. Every round is\nkept as it ends: the same command goes on where "
        "it was, on engines that start anew;\nmore --rounds or another policy add to "
        "the tables.",
    )
    add = parser.add_argument
    add(
        "--policy",
        type=one(parse_bench_arm),
        default="goodput:8",
        help="goodput:8, fixed:3, ...",
    )
    add("--audit", type=float, default=0.1, help="share of audited steps")
    add("--untrained", action="store_true", help="with a drafter of random weights")
    add("--workloads", nargs="+", default=["easy", "hard"])
    add("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    add("--temperature", type=float, default=0.0)
    add("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="some twice or more")
    add("--rounds", type=int, default=5, help="of all ways, twice; later more")
    add("--blocks", type=int, default=4, help="of requests, answered in one go")
    add("--warm-up-rounds", type=int, default=1, help="before, audited")
    add("--max-tokens", type=int, default=128)
    add_pair(parser, TARGET_DIR, DRAFT_DIR)
    add("--target-parameters", type=float, default=100e6, help="0 pads none")
    options = parser.parse_args(arguments)
    if not {AUDITED, HELD} <= {*options.ways}:
        parser.error(f"--ways: {AUDITED} and {HELD} are what all is about; add them")
    return options


if __name__ == "__main__":
    sys.exit(main())
