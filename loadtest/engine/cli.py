"""Command line: ``tetris-serve bench engine --help``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.argument_types import read_minutes, read_positive
from loadtest.client.errors import LoadTestError
from loadtest.models.recipe import DRAFT_DIR, REPO, TARGET_DIR

from .gpu import check_device, find_gpu
from .models import check_models, kv_cache_bytes, pad
from .plan import DEFAULTS, PRESETS, Plan, list_arms, list_cells, split
from .plots import draw
from .report import write_results
from .store import Store
from .workloads import WORKLOADS, RequestMaker, check_workloads, longest_prompt

EXIT_FAILED = 1
EXIT_MORE_TO_DO = 3
EXIT_INTERRUPTED = 130

CACHE = REPO / ".cache" / "engine_bench"
MAX_BATCHED_TOKENS = {"cpu": 2048, "gpu": 8192}


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench engine"
) -> int:
    """Run the benchmark.

    Args:
        arguments: Command line; by default the process's own.
        prog: Name of the program in messages.

    Returns:
        Exit status: 0 when everything is measured, 1 after an error that is explained,
        3 when `--minutes` ran out with work left, 130 after Ctrl-C.
    """
    options = parse(arguments, prog)
    try:
        store = Store(options.output)
        if options.restart:
            store.clear()
        complete = options.report_only or _measure(options, store)
        if complete or store.done():
            draw(write_results(store), options.output / "results.png")
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nstopped; finished groups are kept, the same command goes on from there\n"
        )
        return EXIT_INTERRUPTED
    except LoadTestError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        return EXIT_FAILED
    sys.stderr.write(f"\nresults are in {options.output}\n")
    if not complete:
        sys.stderr.write("not everything is measured yet: run the same command again\n")
        return EXIT_MORE_TO_DO
    return 0


def parse(
    arguments: Sequence[str] | None, prog: str = "tetris-serve bench engine"
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset."""
    parser = _make_parser(prog)
    first = parser.parse_args(arguments)
    preset = first.preset or ("gpu" if first.device == "gpu" else "sweep")
    values = DEFAULTS | PRESETS[preset]
    parser.set_defaults(
        **{name: one for name, one in values.items() if name not in _READ_HERE},
        policies=list_arms(values["policies"]),
    )
    options = parser.parse_args(arguments)
    axes = (options.workloads, options.temperatures, options.concurrency)
    try:
        options.cells = list_cells(values["blocks"], *axes)
    except ValueError as error:
        parser.error(f"--temperatures, --concurrency: {error}")
    if options.target_parameters is None:
        # A model of the user's own is large enough.
        is_demo = options.device == "cpu" and options.target == TARGET_DIR
        options.target_parameters = values["target_parameters"] if is_demo else 0
    return options


_READ_HERE = ("summary", "blocks", "policies", "target_parameters")


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Compare speculation policies on the real engine, offline. Every policy "
            "gets an\nengine in a process of its own; they take turns on the same "
            "requests, and start anew\nin every round. Interrupted, the same command "
            "goes on where it was.\n\nWith --device gpu one engine at a time goes "
            "through all cells of a round."
        ),
        epilog="presets:\n"
        + "\n".join(f"  {name:<8}{one['summary']}" for name, one in PRESETS.items()),
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="where results.json, results.md and results.png go",
    )
    presets = parser.add_mutually_exclusive_group()
    presets.add_argument(
        "--preset", choices=PRESETS, help="default: sweep; with --device gpu, gpu"
    )
    presets.add_argument(
        "--smoke",
        dest="preset",
        action="store_const",
        const="smoke",
        help="same as --preset smoke",
    )
    _add_what(parser.add_argument_group("what is measured (default: the preset's)"))
    _add_models(parser.add_argument_group("models"))
    _add_how(parser.add_argument_group("how"))
    return parser


def _add_what(group: Any) -> None:
    add = group.add_argument
    add(
        "--policies",
        type=_explained(list_arms),
        metavar="LIST",
        help="e.g. none,fixed:3,tetris:2+2,dynamic:6,goodput:8; cold:8 is the engine "
        "of goodput:8 held at depth 0; adaptive:5 is vLLM's own adaptive verification, "
        "on GPUs alone",
    )
    add(
        "--workloads",
        type=_explained(_read_workloads),
        metavar="LIST",
        help=f"of {', '.join(WORKLOADS)}, or files as `bench http` takes them",
    )
    add("--temperatures", metavar="LIST", help="e.g. 0,1")
    add("--concurrency", metavar="LIST", help="requests in flight, e.g. 1,4,16")
    add("--rounds", type=read_positive, metavar="N", help="each on engines anew")
    add(
        "--window-s",
        type=float,
        metavar="S",
        help="how long every policy is measured at least, in each cell of a round",
    )
    add("--max-tokens", type=read_positive, metavar="N", help="longest reply")
    add("--seed", type=int, default=0, help="of the requests")
    add(
        "--trace",
        action="store_true",
        help="keep the first block of every cell step by step, as .npz",
    )


def _add_models(group: Any) -> None:
    add = group.add_argument
    for role, path in (("target", TARGET_DIR), ("draft", DRAFT_DIR)):
        add(
            f"--{role}",
            type=Path,
            default=path,
            metavar="DIR",
            help=f"default: {path.relative_to(REPO)}",
        )
    add(
        "--target-parameters",
        type=_explained(_read_count),
        metavar="N",
        help="pad the target to this size, e.g. 100e6, with the same outputs "
        "(default: the demo's on the CPU; 0 leaves it as it is)",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--max-model-len", type=read_positive, default=2048, metavar="N")


def _add_how(group: Any) -> None:
    add = group.add_argument
    add(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="where the engines run (default: %(default)s)",
    )
    add(
        "--minutes",
        type=read_minutes,
        metavar="N",
        help="begin nothing new after this long; exits with 3 if work is left",
    )
    add("--restart", action="store_true", help="discard what the folder holds")
    add(
        "--report-only",
        action="store_true",
        help="measure nothing; write tables and plots anew",
    )


def _measure(options: argparse.Namespace, store: Store) -> bool:
    from .run import Bench

    gpu = find_gpu() if options.device == "gpu" else None
    check_models(options.target, options.draft)
    requests = RequestMaker.load(options.target, options.seed, options.min_requests)
    return Bench(make_plan(options, gpu), store, requests).measure(options.minutes)


def make_plan(options: argparse.Namespace, gpu: str | None) -> Plan:
    """Return what the options ask for.

    Args:
        options: As `parse` returns them.
        gpu: Name of the GPU, if the engines run on one.

    Raises:
        LoadTestError: If that cannot be measured.
    """
    arms, cells = options.policies, options.cells
    check_device(options, arms, cells)
    reply = options.max_tokens + max(arm.max_depth for arm in arms)
    longest = max(longest_prompt(cell.workload) for cell in cells) + reply
    if longest > options.max_model_len:
        raise LoadTestError(
            f"--max-model-len {options.max_model_len} is too short: prompts, replies "
            f"and drafts take up to {longest} tokens; raise it or lower --max-tokens"
        )
    target = options.target
    if options.target_parameters:
        target = pad(target, options.target_parameters, CACHE)
    most = max(cell.concurrency for cell in cells)
    engine = {
        "device": options.device,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": most,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS[options.device],
        "kv_cache_memory_bytes": kv_cache_bytes(
            target,
            options.draft,
            options.dtype,
            max(
                cell.concurrency * (longest_prompt(cell.workload) + reply)
                for cell in cells
            ),
            most,
        ),
        # Prompts do not repeat within a round, but they do from round to round.
        "enable_prefix_caching": False,
    }
    cpus: tuple[int, ...] = ()
    if gpu is None:
        # Fewer cores: taskset.
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        engine |= {"enforce_eager": True, "cpu_threads": len(cpus)}
    return Plan(
        arms=arms,
        cells=cells,
        rounds=options.rounds,
        window_s=options.window_s,
        max_tokens=options.max_tokens,
        engine=engine,
        target=target,
        draft=options.draft,
        cpus=cpus,
        gpu=gpu,
        trace=options.trace,
    )


def _explained(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Turn a reader's ValueError into one that argparse shows."""

    def read_or_explain(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_or_explain


def _read_workloads(text: str) -> str:
    check_workloads(split(text))
    return text


def _read_count(text: str) -> int:
    return int(float(text))
