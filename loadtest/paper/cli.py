"""Command line: ``tetris-serve bench paper --help``."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from loadtest.argument_types import each
from loadtest.bench_command import make_parser, run_benchmark
from loadtest.engine.cli import add_pair, find_pair
from loadtest.engine.plan import PRESETS as ENGINE_PRESETS
from loadtest.errors import LoadTestError
from loadtest.result_folder import ResultFolder

from .datasets import OWN, load_prompts
from .grid import PRESETS
from .report import write_report
from .run import Runner

_PAIR = ENGINE_PRESETS["smollm2"]


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench paper"
) -> int:
    """Run the experiments; the status is that of `run_benchmark`."""
    options = parse(arguments, prog)
    return run_benchmark(options, ResultFolder, _measure, write_report)


def _measure(options: argparse.Namespace, store: ResultFolder) -> bool:
    if options.acceptance and options.device == "cpu":
        raise LoadTestError(
            "--acceptance: vLLM accepts drafts by chance on GPUs alone; add --device "
            "gpu, or leave it out"
        )
    prompts = load_prompts(dict(options.file), options.datasets, options.seed)
    runner = Runner(options, store, prompts, find_pair(options))
    return runner.measure(options.minutes)


def parse(
    arguments: Sequence[str] | None, prog: str = "tetris-serve bench paper"
) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(
        prog,
        "Run the experiments of the TETRIS paper (arXiv 2502.15197): no speculation, "
        "fixed\nlengths (SD), SmartSpec's (DSD), TETRIS with extra drafts, both "
        "together, and our own\npolicy. All requests come at once, answered "
        "by one\narm after the other, of engines that start anew for each run. "
        "Interrupted, the same command\ngoes on where it was. Without --preset it is "
        "here.",
        PRESETS,
    )
    parser.set_defaults(preset="here")
    add = parser.add_argument
    add(
        "--datasets",
        type=each(str),
        default=OWN,
        metavar="LIST",
        help="own (default; two hundred prompts of ours), sharegpt, arena, tough, "
        "sonnet, mix (sonnet and tough), all_mix (all files)",
    )
    add(
        "--file",
        type=_read_file,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="of a dataset: ShareGPT's JSON, Chatbot Arena's JSON lines, "
        "Domain-Tough's JSON, or a text of verses (repeatable)",
    )
    add(
        "--arms",
        type=each(str),
        default="*",
        metavar="LIST",
        help="measure only these now, e.g. 'none,SD*,ours*'; more can follow",
    )
    add_pair(parser, _PAIR["target"], _PAIR["draft"])
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    add(
        "--acceptance",
        type=_read_rates,
        metavar="RATES",
        help="on a GPU: accept drafts by chance, whatever they are, e.g. 0.8,0.6,0.5, "
        "of each position and all before it. Replies then mean nothing, costs do",
    )
    return parser.parse_args(arguments)


def _read_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FILE, a file there is")
    return name, Path(path)


def _read_rates(text: str) -> tuple[float, ...]:
    rates = each(float)(text)
    falls = all(a >= b for a, b in itertools.pairwise(rates))
    if not falls or not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r}: rates are 0 to 1 and do not rise, e.g. 0.8,0.6,0.5"
        )
    return rates
