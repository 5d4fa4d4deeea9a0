"""Command line: `python -m loadtest.gpu_bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.demo_pair.recipe import DRAFT_DIR, TARGET_DIR
from loadtest.engine_bench.errors import BenchError

from . import parcels
from .plan import PARTS
from .results import Results
from .table import write_report
from .time_limit import TimeLimit

_MIB = 1 << 20


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
    split = commands.add_parser("split", help="cut large files into pieces")
    split.add_argument("files", nargs="+", type=Path)
    split.add_argument("--output", type=Path, required=True, help="folder for pieces")
    split.add_argument("--piece-mib", type=int, default=60, help="largest piece")
    split.add_argument(
        "--load-mib", type=int, default=60, help="most that one transfer takes"
    )
    split.set_defaults(run=_split)
    join = commands.add_parser("join", help="put the files together again")
    join.add_argument("folder", type=Path, help="holds the pieces and the manifest")
    join.add_argument("--output", type=Path, required=True, help="folder for files")
    join.set_defaults(run=_join)
    run = commands.add_parser("run", help="measure one part; prints the tables last")
    run.add_argument("part", choices=list(PARTS))
    run.add_argument("--target", type=Path, default=TARGET_DIR)
    run.add_argument("--draft", type=Path, default=DRAFT_DIR)
    run.add_argument("--cache", type=Path, default=Path(".cache/gpu_bench"))
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


def _split(args: argparse.Namespace) -> int:
    made = parcels.split_files(args.files, args.output, args.piece_mib * _MIB)
    loads = parcels.plan_loads(made, args.output, args.load_mib * _MIB)
    for number, load in enumerate(loads, start=1):
        print(f"load {number}: {parcels.MANIFEST} {' '.join(load)}")
    return 0


def _join(args: argparse.Namespace) -> int:
    for file in parcels.join_files(args.folder, args.output):
        print(file)
    return 0


def _run(args: argparse.Namespace) -> int:
    from .run import ArmEngine, make_models, make_requests, measure_part

    part = PARTS[args.part]
    limit = TimeLimit(args.limit_s or part.limit_s)
    models = make_models(part, args.target, args.draft, args.cache)
    results = Results(args.output)
    complete = True
    if part.arms:
        requests = make_requests(args.target)
        complete = measure_part(
            part,
            requests,
            lambda arm, timeout_s: ArmEngine(
                part,
                arm,
                models,
                args.output / "logs",
                requests.eos_token_id,
                timeout_s,
            ),
            results,
            limit,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
        (args.output / "report.md").write_text(write_report(results.read()))
        print(write_report(results.read()))
    else:
        print(f"target: {models[0]}\ndraft: {models[1]}")
    if not complete:
        print("Not complete: the same command goes on.", file=sys.stderr)
    return 0 if complete else 3


def _report(args: argparse.Namespace) -> int:
    print(write_report(Results(args.output).read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
