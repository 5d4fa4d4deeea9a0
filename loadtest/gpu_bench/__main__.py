"""Command line: `python -m loadtest.gpu_bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.demo_pair.recipe import DRAFT_DIR, TARGET_DIR
from loadtest.engine_bench.errors import BenchError

from . import transfer
from .plan import PARTS, GpuArm, env_of
from .results import LOGS, REPORT, Results, copy_results
from .table import write_report
from .time_limit import TimeLimit
from .waits import count_waits

_MIB = 1 << 20

_MOST_PRINTED = 10_000
"""Characters of tables: some machines hand back only the end of what is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _make_parser().parse_args(arguments)
    try:
        status: int = args.run(args)
        return status
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; what was measured is kept.", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu_bench",
        description=__doc__,
        epilog="Parts, in order: "
        + ", ".join(f"{part.name} ({part.limit_s:.0f} s)" for part in PARTS.values()),
    )
    commands = parser.add_subparsers(required=True)
    prepare = commands.add_parser(
        "prepare",
        help="download wheels for a machine without a network; print what to run there",
    )
    prepare.add_argument(
        "--have",
        type=Path,
        help="what `python3 -m pip list --format=freeze` prints there",
    )
    prepare.add_argument(
        "--most-mib",
        type=int,
        default=64,
        help="most that one transfer takes, the working tree included",
    )
    prepare.add_argument(
        "--output",
        type=Path,
        default=Path(".cache/gpu_bench"),
        help="folder for wheels and loads, inside the working tree, ignored by git",
    )
    prepare.set_defaults(run=_prepare)
    install = commands.add_parser("install", help="put the wheels together there")
    install.add_argument("folder", type=Path, help="holds all pieces and the manifest")
    install.add_argument("--place", type=Path, required=True, help="for the result")
    install.set_defaults(run=_install)
    run = commands.add_parser("run", help="measure one part; prints the tables last")
    run.add_argument("part", choices=list(PARTS))
    run.add_argument("--target", type=Path, default=TARGET_DIR)
    run.add_argument("--draft", type=Path, default=DRAFT_DIR)
    run.add_argument("--cache", type=Path, default=Path(".cache/gpu_bench"))
    run.add_argument(
        "--copy-to", type=Path, help="folder for copies of all results after every arm"
    )
    run.add_argument("--limit-s", type=float, help="instead of the part's own limit")
    _add_output(run)
    run.set_defaults(run=_run)
    report = commands.add_parser("report", help="print the tables of what there is")
    _add_output(report)
    report.set_defaults(run=_report)
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/scratch/gpu"),
        help="folder of the measurements; an interrupted part goes on there",
    )


def _prepare(args: argparse.Namespace) -> int:
    present = transfer.read_pins(args.have.read_text()) if args.have else {}
    pins = transfer.read_pins(transfer.GPU_LOCK.read_text())
    wanted = transfer.choose_wheels(pins, present)
    wheels = transfer.download(wanted, args.output / "wheels")
    room = args.most_mib * _MIB - transfer.measure_tree() - transfer.MARGIN_BYTES
    loads = transfer.make_loads(wheels, args.output, room)
    total = sum(wheel.stat().st_size for wheel in wheels) / _MIB
    print(f"{len(wheels)} wheels, {total:.0f} MiB in {len(loads)} transfers.")
    print("Run there, in the working tree, each command by itself:")
    for carried, command in transfer.list_commands(loads):
        print(f"# carries {carried}" if carried else "# carries nothing")
        print(command)
    return 0


def _install(args: argparse.Namespace) -> int:
    print(transfer.install(args.folder.expanduser(), args.place.expanduser()))
    return 0


def _run(args: argparse.Namespace) -> int:
    from .run import (
        WAITS,
        ArmEngine,
        log_file,
        make_models,
        make_requests,
        measure_part,
    )

    part = PARTS[args.part]
    limit = TimeLimit(args.limit_s or part.limit_s)
    models = make_models(part, args.target, args.draft, args.cache, limit)
    results, logs = Results(args.output), args.output / LOGS
    complete = True
    if part.arms:
        requests = make_requests(args.target)

        def keep(arm: GpuArm) -> None:
            log = log_file(logs, part, arm)
            if "VLLM_GPU_SYNC_CHECK" in env_of(part) and log.exists():
                places = count_waits(log.read_text(errors="replace"))
                results.append(part.pair.name, arm.name, WAITS, {"places": places})
            report = write_report(results.read())
            (args.output / REPORT).write_text(report)
            if args.copy_to is not None:
                copy_results(args.output, args.copy_to)

        complete = measure_part(
            part,
            requests,
            lambda arm, timeout_s: ArmEngine(
                part, arm, models, logs, requests.eos_token_id, timeout_s
            ),
            results,
            limit,
            lambda text: print(text, file=sys.stderr, flush=True),
            keep,
        )
        print(_shorten(write_report(results.read(), part.pair.name)))
    else:
        print(f"target: {models[0]}\ndraft: {models[1]}")
    if not complete:
        print("Not complete: the same command goes on.", file=sys.stderr)
    return 0 if complete else 3


def _shorten(text: str) -> str:
    """Leave out the middle of what would not fit; `report.md` has all of it."""
    if len(text) <= _MOST_PRINTED:
        return text
    half = _MOST_PRINTED // 2
    return f"{text[:half]}\n... (report.md has all)\n{text[-half:]}"


def _report(args: argparse.Namespace) -> int:
    print(write_report(Results(args.output).read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
