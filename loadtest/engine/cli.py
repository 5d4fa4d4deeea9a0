"""Command line: ``tetris-serve bench engine --help``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.argument_types import each, read_positive
from loadtest.bench_command import make_parser, read_options, run_benchmark, say
from loadtest.environment import REPO
from loadtest.errors import LoadTestError
from loadtest.load.workloads import make_workload
from loadtest.models.recipe import DRAFT_DIR, TARGET_DIR
from loadtest.result_folder import ResultFolder
from serving.offline import find_model

from .models import check_models
from .plan import PRESETS, find_gpu, make_plan, parse_bench_arm
from .report import write_report
from .run import Bench
from .workloads import DRIFTS, WORKLOADS, RequestMaker


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench engine"
) -> int:
    """Run the benchmark; the status is that of `run_benchmark`."""
    return run_benchmark(parse(arguments, prog), ResultFolder, _measure, write_report)


def _measure(options: argparse.Namespace, store: ResultFolder) -> bool:
    plan = make_plan(options, find_pair(options))
    requests = RequestMaker.load(
        options.target, options.seed, plan.max_tokens, options.max_prompt_tokens
    )
    for name in {cell.workload for cell in plan.cells} - DRIFTS.keys():
        make_workload(name, "")  # Told before engines start if it cannot be.
    return Bench(plan, store, requests).measure(options.minutes)


def parse(
    arguments: Sequence[str] | None, prog: str = "tetris-serve bench engine"
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset."""
    options = read_options(
        _make_parser(prog),
        arguments,
        PRESETS,
        lambda given: given.preset or ("gpu" if given.device == "gpu" else "sweep"),
    )
    if options.target_parameters is None:
        # A model of the user's own is large enough.
        is_demo = options.target == TARGET_DIR
        options.target_parameters = options.demo_parameters if is_demo else 0
    return options


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = make_parser(
        prog,
        "Compare speculation policies on the real engine, offline. Every policy "
        "gets an\nengine in a process of its own; they take turns on the same "
        "requests, and start anew\nin every round. Interrupted, the same command "
        "goes on where it was.\n\nWith --device gpu one engine at a time goes "
        "through all cells of a round. Without\n--preset it is sweep, or gpu.",
        PRESETS,
    )
    add = parser.add_argument
    add(
        "--policies",
        type=each(parse_bench_arm),
        metavar="LIST",
        help="e.g. none,fixed:3,tetris:2+2,dynamic:6,goodput:8; ngram:3 drafts by the "
        "prompt's own words; cold:8 is the engine of goodput:8 held at depth 0; "
        "adaptive:5 is vLLM's own adaptive verification, on GPUs alone; "
        "goodput:8:probabilistic draws its drafts",
    )
    add(
        "--workloads",
        type=each(str),
        metavar="LIST",
        help=f"of {', '.join(WORKLOADS)}, or files as `bench http` takes them",
    )
    add("--temperatures", type=each(float), metavar="LIST", help="e.g. 0,1")
    add(
        "--concurrency",
        type=each(read_positive),
        metavar="LIST",
        help="requests in flight, e.g. 1,4,16",
    )
    add("--rounds", type=read_positive, metavar="N", help="each on engines anew")
    add("--window-s", type=float, metavar="S", help="least time of a policy in a cell")
    add("--max-tokens", type=read_positive, metavar="N", help="longest reply")
    add(
        "--max-prompt-tokens",
        type=read_positive,
        metavar="N",
        help="longest prompt, for which each engine has memory; longer ones are left "
        "out (default: by workload)",
    )
    add_pair(parser, TARGET_DIR, DRAFT_DIR)
    add(
        "--target-parameters",
        type=float,
        metavar="N",
        help="pad the target to this size, e.g. 100e6, with the same outputs "
        "(default: the demo's; 0 leaves it as it is)",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="default: bfloat16, float32 on a CPU that has no instructions for it",
    )
    return parser


def add_pair(
    parser: argparse.ArgumentParser, target: str | Path, draft: str | Path
) -> None:
    """Add the options of every benchmark on engines."""
    add = parser.add_argument
    for role, model in (("target", target), ("draft", draft)):
        shown = str(model).removeprefix(f"{REPO}/")
        told: dict[str, Any] = {"metavar": "DIR", "help": f"default: {shown}"}
        add(f"--{role}", type=Path, default=Path(model), **told)
    add("--device", choices=("cpu", "gpu"), default="cpu", help="of the engines")
    add("--seed", type=int, default=0, help="of the requests")


def find_pair(options: argparse.Namespace) -> str | None:
    """Find the models that are asked for; return the GPU's name if one is."""
    gpu = find_gpu() if options.device == "gpu" else None
    try:
        options.target = find_model(str(options.target), say)
    except ValueError as error:
        raise LoadTestError(f"--target: {error}") from None
    check_models(options.target, options.draft)
    return gpu


def find_pair_on_cpu(options: argparse.Namespace) -> None:
    """Find the models that are asked for, where a GPU has no room for all engines."""
    if find_pair(options) is not None:
        raise LoadTestError("--device gpu: all arms have an engine at once; use cpu")
