"""Command line: ``tetris-serve simulate --help``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.argument_types import read_positive
from loadtest.interrupts import interruptible
from loadtest.progress import Progress

from .autoscale import SCALERS, parse_scaler
from .compare import ArmResult, Interval, Plan, compare
from .engine import MODELS, find_model, load_engine
from .fleet import (
    LEAST_REQUESTS,
    PIECES,
    PREFIX_ROUTERS,
    ROUTERS,
    WARM_UP_SHARE,
    Targets,
)
from .load import Lengths, Load, draw_requests, parse_arrivals, read_load
from .readers import explained, number, read_depth, read_shares, read_slow
from .recorded import read_folder
from .scenario import read_words
from .sessions import parse_sessions
from .state import ALL, WORTH

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_HEADERS = {
    "goodput_per_s": "goodput/s",
    "attainment": "attainment",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "cached_share": "cached",
    "replica_hours": "replica-hours",
}


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve simulate"
) -> int:
    """Compare routers or autoscalers on a simulated fleet.

    Args:
        arguments: Command line; by default the process's own.
        prog: Name of the program in messages.

    Returns:
        Exit status: 0 when all is simulated, 1 after an error that is explained, 130
        after Ctrl-C; 2, by `SystemExit`, for options that cannot be read.
    """
    parser = _make_parser(prog)
    options = parser.parse_args(arguments)
    try:
        if options.scenario or options.deployment:
            given = list(sys.argv[1:] if arguments is None else arguments)
            words = read_words(options.scenario, options.deployment, given)
            options = parser.parse_args([*words, *given])
        with interruptible():
            plan = _make_plan(options)
            _check_output(options.json)
            runs = len(plan.arms) * len(plan.seeds)
            results = compare(plan, Progress(runs * PIECES))
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; nothing was written\n")
        return EXIT_INTERRUPTED
    except MemoryError:
        sys.stderr.write("\nerror: no memory for so many --requests; take fewer\n")
        return EXIT_FAILED
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    sys.stderr.write("\n")
    sys.stdout.write(_render(plan, results))
    if options.json:
        text = json.dumps(_describe(plan, results), indent=1, allow_nan=False)
        options.json.write_text(text + "\n", "utf-8")
        sys.stderr.write(f"results are in {options.json}\n")
    return 0


def _make_plan(options: argparse.Namespace) -> Plan:
    if options.requests < LEAST_REQUESTS:
        raise ValueError(
            f"--requests {options.requests}: take {LEAST_REQUESTS} or more"
        )
    engine = load_engine(
        *(find_model(options.engine), options.drafts, options.batch),
        WORTH if options.select else ALL,
        read_folder(options.recorded) if options.recorded else None,
    )
    load = (
        read_load(options.trace, *options.hard_share)
        if options.trace
        else Load(
            options.load,
            Lengths(options.prompt_tokens, options.length_cv),
            Lengths(options.output_tokens, options.length_cv),
            *(*options.hard_share, "", options.sessions),
        )
    )
    if options.trace:
        # Found out before the work: a trace ends.
        draw_requests(load, options.requests, 1.0, 0)
    capacity_per_s = options.replicas * engine.capacity_per_s(load)
    if options.autoscaler and (options.router or options.slow_replicas[0]):
        raise ValueError(
            "--autoscaler is an arm of its own: its requests go to the better of two, "
            "replicas alike; leave out --router and --slow-replicas"
        )
    arms = options.autoscaler or options.router or ROUTERS
    return Plan(
        engine=engine,
        load=load,
        num_replicas=options.replicas,
        num_requests=options.requests,
        rate_per_s=options.rate or options.utilisation * capacity_per_s,
        staleness_s=options.staleness_ms / 1e3,
        targets=Targets(options.ttft_target_ms, options.tpot_target_ms),
        arms=list(dict.fromkeys(arms)),
        seeds=range(options.seeds),
        slow=options.slow_replicas,
        start_s=options.start_s,
    )


def _check_output(path: Path | None) -> None:
    """Find out before the work whether its results can be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--json {path}: not a file in a folder that exists")


def _render(plan: Plan, results: Mapping[str, ArmResult]) -> str:
    """Return the tables."""
    first = plan.arms[0]
    lines = [
        f"{plan.num_replicas} replicas of {plan.engine.name}, "
        f"{plan.num_requests} requests at {plan.rate_per_s:.4g}/s "
        f"({_utilisation(plan):.0%} of capacity), telemetry {plan.staleness_s:g} s "
        f"old, {len(plan.seeds)} seeds; 95 % intervals",
        "",
        *_table({arm: result.means for arm, result in results.items()}),
    ]
    others = {arm: result.ratios for arm, result in results.items() if arm != first}
    if others:
        lines += ["", f"over {first}, paired by seed:", *_table(others)]
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, Mapping[str, Interval]]) -> list[str]:
    shown = [name for name in _HEADERS if any(name in row for row in rows.values())]
    cells = [["arm", *(_HEADERS[name] for name in shown)]]
    for arm, values in rows.items():
        cells.append([arm, *(_format(values.get(name)) for name in shown)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in cells
    ]


def _format(value: Interval | None) -> str:
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.value:.4g}"
    return f"{value.value:.4g} ({value.low:.4g}, {value.high:.4g})"


def _utilisation(plan: Plan) -> float:
    capacity_per_s = plan.num_replicas * plan.engine.capacity_per_s(plan.load)
    return plan.rate_per_s / capacity_per_s


def _describe(plan: Plan, results: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Return settings and results as JSON holds them; equal runs give equal ones."""
    return {
        "engine": {
            "name": plan.engine.name,
            "costs": plan.engine.costs._asdict(),
            "tokens_per_step": plan.engine.tokens_per_step.tolist(),
        },
        "load": dataclasses.asdict(plan.load),
        "num_replicas": plan.num_replicas,
        "start_s": plan.start_s,
        "num_requests": plan.num_requests,
        "warm_up_share": WARM_UP_SHARE,
        "rate_per_s": plan.rate_per_s,
        "utilisation": _utilisation(plan),
        "staleness_s": plan.staleness_s,
        "slow": list(plan.slow),
        "targets": dataclasses.asdict(plan.targets),
        "seeds": list(plan.seeds),
        "arms": {arm: dataclasses.asdict(result) for arm, result in results.items()},
    }


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare routers or autoscalers on a simulated fleet.",
    )
    add = parser.add_argument
    add(
        "scenario",
        nargs="?",
        type=Path,
        help="YAML file of options, without dashes; those given beside it count more",
    )
    add(
        "--deployment",
        type=Path,
        metavar="FILE",
        help="settings as `tetris-serve up` takes them, for batch, drafts and "
        "autoscaler; --replicas is how far it may grow",
    )
    small = 1e-6
    names = ", ".join(path.stem for path in sorted(MODELS.glob("*.json")))
    add(
        "--engine",
        default="h100-qwen3-1.7b",
        help=f"{names}, or a file like theirs (%(default)s)",
    )
    add(
        "--replicas",
        type=read_positive,
        default=64,
        metavar="N",
        help="in the fleet (%(default)s)",
    )
    add(
        "--requests",
        type=read_positive,
        default=20_000,
        metavar="M",
        help="a seed (%(default)s)",
    )
    add(
        "--router",
        action="append",
        choices=ROUTERS | PREFIX_ROUTERS,
        help="an arm; repeat it to compare with the first (default: all but "
        "prefix-affinity, which without shared prefixes is power-of-two-sent)",
    )
    add(
        "--autoscaler",
        action="append",
        type=explained(parse_scaler),
        metavar="NAME:TARGET",
        help=f"an arm that grows and shrinks up to --replicas, in place of routers: "
        f"{', '.join(SCALERS)}; the target is requests of a replica for the first, ms "
        "between two tokens for the others",
    )
    add(
        "--start-s",
        type=number(0),
        default=60.0,
        help="that a replica takes to start (%(default)g)",
    )
    add(
        "--load",
        type=explained(parse_arrivals),
        default="poisson",
        help="poisson, gamma=CV (bursts), diurnal=SWING (peak over night); %(default)s",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Azure's or BurstGPT's .csv, or Mooncake's .jsonl, in place of --load and "
        "lengths, at the rate that is asked for",
    )
    add(
        "--sessions",
        type=explained(parse_sessions),
        metavar="TURNS[:THINK_S[:SYSTEM]]",
        help="requests belong to sessions of TURNS on average, THINK_S (10) apart: "
        "each prompt carries all before it, behind SYSTEM (0) tokens that its kind has "
        "in common; lengths are then what a turn adds",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=number(small), metavar="PER_S", help="of requests")
    rate.add_argument(
        "--utilisation",
        type=number(small, 10),
        default=0.8,
        metavar="SHARE",
        help="rate over what the fleet finishes with all batches full (%(default)g)",
    )
    add(
        "--staleness-ms",
        type=number(0),
        default=100.0,
        help="age of telemetry (%(default)s)",
    )
    add(
        "--seeds",
        type=read_positive,
        default=5,
        metavar="N",
        help="runs of an arm (%(default)s)",
    )
    add(
        "--slow-replicas",
        type=read_slow,
        default="0",
        metavar="SHARE[:TIMES]",
        help="whose steps take TIMES (2) as long, as beside a neighbour (%(default)s)",
    )
    add("--prompt-tokens", type=number(1), default=300.0, help="mean (%(default)g)")
    add("--output-tokens", type=number(1), default=200.0, help="mean (%(default)g)")
    add(
        "--length-cv",
        type=number(0, 10),
        default=1.0,
        help="coefficient of variation of both, lognormal (%(default)g)",
    )
    add(
        "--hard-share",
        type=read_shares,
        default="0.5",
        metavar="SHARE[:LATER]",
        help="of hard requests; LATER holds for the second half (%(default)s)",
    )
    add(
        "--drafts",
        type=read_depth,
        default=3,
        help="of a request in a step, at most (%(default)s)",
    )
    add(
        "--select",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="draft as deep and verify as many as is worth its time, as goodput does; "
        "else all",
    )
    add(
        "--recorded",
        type=Path,
        metavar="DIR",
        help="drafts of fixed length that bench engine has traced (*.npz), in place of "
        "chances: traces in which less is accepted are of hard requests",
    )
    add("--batch", type=read_positive, help="requests in a step (the engine's own)")
    add(
        "--ttft-target-ms",
        type=number(small),
        default=500.0,
        help="of goodput (%(default)g)",
    )
    add(
        "--tpot-target-ms",
        type=number(small),
        default=10.0,
        help="of goodput (%(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="write settings and results to it")
    return parser
