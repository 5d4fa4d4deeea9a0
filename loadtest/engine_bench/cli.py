"""Command line: ``python -m loadtest.engine_bench --help``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.models.recipe import DRAFT_DIR, REPO, TARGET_DIR

from .argument_types import (
    read_arms,
    read_concurrencies,
    read_cpus,
    read_minutes,
    read_parameters,
    read_positive,
    read_requests_per_slot,
    read_temperatures,
    read_workloads,
)
from .arms import Arm
from .errors import BenchError
from .gpu import check_device, find_gpu, on_gpu
from .models import check_model, check_tokenizer, kv_cache_bytes, pad
from .plan import (
    PLANNING,
    PRESETS,
    Cell,
    Preset,
    is_planning,
    list_cells,
    replace_axes,
)
from .settings import BenchSettings, EngineSettings
from .store import Store
from .workloads import WORKLOADS, RequestMaker, load_render, longest_prompt

EXIT_FAILED = 1
EXIT_MORE_TO_DO = 3
EXIT_INTERRUPTED = 130

CACHE = REPO / ".cache" / "engine_bench"
MAX_BATCHED_TOKENS = 2048


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the benchmark.

    Args:
        arguments: Command line; by default the process's own.
        prog: Name of the program in messages.

    Returns:
        Exit status: 0 when everything is measured, 1 after an error that is explained,
        3 when `--minutes` ran out with work left, 130 after Ctrl-C.
    """
    options = make_parser(prog).parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nstopped; finished groups are kept, the same command goes on from there\n"
        )
        return EXIT_INTERRUPTED
    except BenchError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        return EXIT_FAILED


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog=prog or "python -m loadtest.engine_bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Compare speculation policies on the real engine, offline. Every policy "
            "gets an\nengine in a process of its own; they take turns on the same "
            "requests, round by\nround, and all but one are stopped. Interrupted, the "
            "same command goes on where\nit was.\n\nWith --device gpu one engine at a "
            "time goes through all cells of a round. That has not\nyet run on a GPU."
        ),
        epilog="presets:\n"
        + "\n".join(f"  {name:<8}{p.summary}" for name, p in PRESETS.items()),
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="where results.json, results.md and plots go",
    )
    presets = parser.add_mutually_exclusive_group()
    presets.add_argument(
        "--preset", choices=PRESETS, help="default: full; with --device gpu, gpu"
    )
    presets.add_argument(
        "--smoke",
        dest="preset",
        action="store_const",
        const="smoke",
        help="same as --preset smoke",
    )
    _add_what(parser)
    _add_models(parser)
    _add_how(parser)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured (default: the preset's)")
    group.add_argument(
        "--policies",
        type=read_arms,
        metavar="LIST",
        help="e.g. none,fixed:3,tetris:2+2,dynamic:6,goodput:8; cold:8 and warm:8 are "
        "the engine of goodput:8 held at depth 0; adaptive:5 is vLLM's own adaptive "
        "verification, on GPUs alone",
    )
    group.add_argument(
        "--workloads",
        type=read_workloads,
        metavar="LIST",
        help=f"of {', '.join(WORKLOADS)}",
    )
    group.add_argument("--temperatures", type=read_temperatures, metavar="LIST")
    group.add_argument(
        "--concurrency",
        type=read_concurrencies,
        metavar="LIST",
        help="requests in flight, e.g. 1,4,16",
    )
    group.add_argument("--rounds", type=read_positive, metavar="N")
    group.add_argument(
        "--max-tokens", type=read_positive, metavar="N", help="longest reply"
    )
    group.add_argument(
        "--min-requests",
        type=read_positive,
        metavar="N",
        help="fewest requests of a cell, of a drifting one after the change",
    )
    group.add_argument(
        "--requests-per-slot",
        type=read_requests_per_slot,
        metavar="N",
        help="requests of a cell for each one in flight, at least 3",
    )
    group.add_argument("--seed", type=int, default=0, help="of the requests")
    group.add_argument(
        "--trace",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end with an unmeasured round that records every step as .npz; the plots "
        "of calibration, decisions and step times come from it",
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    for role, path in (("target", TARGET_DIR), ("draft", DRAFT_DIR)):
        group.add_argument(
            f"--{role}",
            type=Path,
            default=path,
            metavar="DIR",
            help=f"default: {path.relative_to(REPO)}",
        )
    group.add_argument(
        "--target-parameters",
        type=read_parameters,
        metavar="N",
        help="pad the target to this size, e.g. 100M, with the same outputs; 0 leaves "
        "it as it is",
    )
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    group.add_argument("--max-model-len", type=read_positive, default=2048, metavar="N")


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="where the engines run (default: %(default)s; gpu is untried)",
    )
    group.add_argument(
        "--cpus",
        type=read_cpus,
        metavar="LIST",
        help="cores of the engines, e.g. 0,1 or 0-3 (default: all this process may "
        "use)",
    )
    group.add_argument(
        "--minutes",
        type=read_minutes,
        metavar="N",
        help="begin nothing new after this long; exits with 3 if work is left",
    )
    group.add_argument(
        "--rounds-per-start",
        type=read_positive,
        metavar="N",
        help="start all engines anew after every N rounds: what differs from start to "
        "start then shows in the intervals (default: the preset's; most start once)",
    )
    group.add_argument(
        "--restart", action="store_true", help="discard what the folder holds"
    )
    group.add_argument(
        "--report-only",
        action="store_true",
        help="measure nothing; write tables and plots anew",
    )


def choose_preset(options: argparse.Namespace) -> Preset:
    """Return the preset asked for, or the device's own."""
    return PRESETS[options.preset or ("gpu" if options.device == "gpu" else "full")]


def _run(options: argparse.Namespace) -> int:
    from .report import draw_plots, write_results

    store = Store(options.output)
    if options.restart:
        store.clear()
    complete = options.report_only or _measure(options, store)
    draw_plots(store, write_results(store, with_bounds=True))
    sys.stderr.write(f"\nresults are in {options.output}\n")
    if not complete:
        sys.stderr.write("not everything is measured yet: run the same command again\n")
        return EXIT_MORE_TO_DO
    return 0


def _measure(options: argparse.Namespace, store: Store) -> bool:
    from .run import Bench

    preset = choose_preset(options)
    gpu = find_gpu() if options.device == "gpu" else None
    check_model("--target", options.target)
    check_model("--draft", options.draft)
    check_tokenizer("--target", options.target)
    requests = RequestMaker(
        *load_render(options.target),
        options.seed,
        options.min_requests or preset.min_requests,
        options.requests_per_slot or preset.requests_per_slot,
        max(options.requests_per_slot or 0, preset.drift_requests_per_slot),
    )
    settings = _make_settings(options, preset, requests)
    if gpu is not None:
        settings = on_gpu(settings, gpu)
    return Bench(settings, store, requests).measure(options.minutes)


def _make_settings(
    options: argparse.Namespace, preset: Preset, requests: RequestMaker
) -> BenchSettings:
    arms = options.policies or preset.arms()
    cells = _list_cells(options, preset, arms)
    check_device(options, arms, cells)
    max_tokens = options.max_tokens or preset.max_tokens
    reply = max_tokens + max(arm.max_depth for arm in arms)
    longest = max(longest_prompt(cell.workload) for cell in cells) + reply
    if longest > options.max_model_len:
        raise BenchError(
            f"--max-model-len {options.max_model_len} is too short: prompts, replies "
            f"and drafts take up to {longest} tokens; raise it or lower --max-tokens"
        )
    target = _padded(options, preset)

    def size_kv_cache(cells: Sequence[Cell]) -> int:
        if not cells:
            return 0
        return kv_cache_bytes(
            target,
            options.draft,
            options.dtype,
            max(
                cell.concurrency * (longest_prompt(cell.workload) + reply)
                for cell in cells
            ),
            max(cell.concurrency for cell in cells),
        )

    return BenchSettings(
        arms=arms,
        cells=cells,
        rounds=options.rounds or preset.rounds,
        engine=EngineSettings(
            target=target,
            draft=options.draft,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=max(cell.concurrency for cell in cells),
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            kv_cache_memory_bytes=size_kv_cache(
                [cell for cell in cells if not is_planning(cell)]
            ),
            planning_kv_cache_memory_bytes=size_kv_cache(
                [cell for cell in cells if is_planning(cell)]
            ),
        ),
        cpus=options.cpus or tuple(sorted(os.sched_getaffinity(0))),
        max_tokens=max_tokens,
        seed=options.seed,
        min_requests=requests.min_requests,
        requests_per_slot=requests.requests_per_slot,
        drift_requests_per_slot=requests.drift_requests_per_slot,
        trace=preset.trace if options.trace is None else options.trace,
        rounds_per_start=options.rounds_per_start or preset.rounds_per_start,
        sweep_arms=frozenset() if options.policies else preset.sweep_arms(),
    )


def _list_cells(
    options: argparse.Namespace, preset: Preset, arms: Sequence[Arm]
) -> tuple[Cell, ...]:
    axes = options.workloads, options.temperatures, options.concurrency
    blocks = replace_axes(preset.blocks, *axes)
    if axes == (None, None, None):
        blocks += preset.planning_blocks()
    cells = list_cells(blocks)
    if not any(arm.policy == "goodput" for arm in arms):
        cells = tuple(cell for cell in cells if not is_planning(cell))
    if not cells:
        raise BenchError(
            f"--workloads {PLANNING} is about goodput: name it with --policies"
        )
    return cells


def _padded(options: argparse.Namespace, preset: Preset) -> Path:
    parameters = options.target_parameters
    if parameters is None and options.device == "cpu":
        parameters = preset.target_parameters
    target: Path = options.target
    return pad(target, parameters, CACHE) if parameters else target
