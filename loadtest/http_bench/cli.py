"""Command line: ``python -m loadtest.http_bench --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loadtest.engine_bench.argument_types import read_minutes, read_positive

from .arms import Arm, parse_arm
from .chaos import check_chaos, parse_chaos
from .deployment import Launcher
from .errors import LoadTestError
from .experiment import Cell, Experiment, Traffic
from .load import Load, parse_load
from .objectives import Objective, parse_objective
from .options import HEADER_VARIABLE, read_extra_body, read_header
from .presets import PRESETS
from .report import write_report, write_results
from .run import Runner
from .store import LOG_FOLDER, Store
from .summary import Limits, Targets
from .workloads import GENERATED, make_workload

EXIT_FAILED = 1
EXIT_MORE_TO_DO = 3
EXIT_INTERRUPTED = 130

_DURATION_S = 60.0
_SOAK_S = 3600.0

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run an experiment.

    Args:
        arguments: Command line; by default the process's own.
        prog: Name of the program in messages.

    Returns:
        Exit status: 0 when everything is measured and every objective met, 1 after an
        error that is explained or when an objective is missed, 2 for options that
        cannot work, 3 when `--minutes` ran out with work left, 130 after Ctrl-C.
    """
    options = parse_options(arguments, prog)
    try:
        return _run(options)
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nstopped; finished runs are kept, the same command goes on from there\n"
        )
        return EXIT_INTERRUPTED
    except LoadTestError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        return EXIT_FAILED


def parse_options(
    arguments: Sequence[str] | None = None, prog: str | None = None
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset."""
    parser = make_parser(prog)
    preset = parser.parse_args(arguments).preset
    if preset is not None:
        values = dict(PRESETS[preset].options)
        # argparse reads texts of defaults, but not those in lists.
        values["arm"] = [parse_arm(text) for text in values.get("arm", ())]
        parser.set_defaults(**values)
    options = parser.parse_args(arguments)
    if not options.report_only and not (options.policies or options.arm):
        parser.error("give --policies, --arm or --preset: there is nothing to measure")
    return options


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog=prog or "python -m loadtest.http_bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Put load on OpenAI-compatible endpoints and compare them. Every arm is "
            "started,\nwarmed up, measured and stopped in turn, round by round. "
            "Interrupted, the same\ncommand goes on where it was."
        ),
        epilog="presets:\n"
        + "\n".join(f"  {name:<10}{p.summary}" for name, p in PRESETS.items()),
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="where report.html, results.json and runs.csv go",
    )
    parser.add_argument("--preset", choices=PRESETS, help="values for other options")
    _add_arms(parser)
    _add_load(parser)
    _add_how(parser)
    return parser


def _add_arms(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--policies",
        type=_each(parse_arm),
        default=(),
        metavar="LIST",
        help="served by tetris-serve up, e.g. none,fixed:3,tetris:2+2,goodput:8",
    )
    group.add_argument(
        "--arm",
        type=_one(parse_arm),
        action="append",
        default=[],
        metavar="NAME=WHAT",
        help="one more arm: NAME=http://host:port of a server that runs, "
        "NAME='cmd:vllm serve ... --port {port}' of one to start, NAME=POLICY, or "
        "NAME=vllm:POLICY for none or fixed:K served by vLLM alone",
    )
    group.add_argument(
        "--config",
        default="configs/demo.yaml",
        metavar="FILE",
        help="deployment file of the policies (default: %(default)s)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace a setting in it, e.g. replicas.max=3 (repeatable)",
    )
    group.add_argument(
        "--metrics-url",
        type=_one(_read_pair),
        action="append",
        default=[],
        metavar="NAME=URL",
        help="Prometheus page of an arm that runs already (default: its /metrics)",
    )
    group.add_argument(
        "--deployment-pid",
        type=read_positive,
        metavar="PID",
        help="of an arm that runs already on this machine, for --chaos and --soak",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load",
        "PROCESS:SHAPE. Processes: closed (requests in flight), or arrivals a second: "
        "paced, poisson, gamma=CV (bursts). Shapes: 8, ramp:1-32, ladder:4-16x4, "
        "spike:4-32, diurnal:1-8x2.",
    )
    add = group.add_argument
    add(
        "--loads",
        type=_each(parse_load),
        default="closed:8",
        metavar="LIST",
        help="(default: %(default)s)",
    )
    add(
        "--workloads",
        type=_each(str),
        default="mixed",
        metavar="LIST",
        help=f"of {', '.join(GENERATED)}, or files: ShareGPT .json or .jsonl, or one "
        "prompt a line (default: %(default)s)",
    )
    add(
        "--duration",
        type=_seconds,
        metavar="S",
        help=f"of every run (default: {_DURATION_S:g}; with --soak {_SOAK_S:g})",
    )

    def add_number(
        name: str, kind: Callable[[str], Any], default: Any, help: str
    ) -> None:
        metavar = "S" if kind is _seconds else "N"
        shown = f"{help} (default: {default:g})" if default else help
        add(name, type=kind, default=default, metavar=metavar, help=shown)

    add_number(
        "--requests", read_positive, 0, "send as many in every run, in closed loop"
    )
    add_number("--lead-in", _seconds, 5.0, "left out of every run")
    add_number("--drain", _seconds, 60.0, "to finish requests after a run")
    add_number("--warm-up", _seconds, 10.0, "of load after a start, thrown away")
    add_number("--max-tokens", read_positive, 128, "longest reply")
    add("--temperature", type=float, default=0.0, help="of sampling (default: 0)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add("--model", default="", help="name to ask for (default: the first one listed)")
    add("--extra-body", default="{}", metavar="JSON", help="more of each request")
    add(
        "--header",
        default="",
        metavar="NAME: VALUE",
        help=f"e.g. an API key; also from the variable {HEADER_VARIABLE}",
    )
    add_number(
        "--max-prompt-chars",
        read_positive,
        0,
        "leave out longer conversations of a file (default: none)",
    )
    add_number("--processes", read_positive, 1, "processes of the client")


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("targets and verdict")
    add = group.add_argument
    add(
        "--ttft-target-ms",
        type=_seconds,
        default=1000.0,
        metavar="MS",
        help="longest time to first token that counts as goodput; 0 for any "
        "(default: %(default)g)",
    )
    add(
        "--tpot-target-ms",
        type=_seconds,
        default=100.0,
        metavar="MS",
        help="longest time per output token; 0 for any (default: %(default)g)",
    )
    add(
        "--objective",
        type=_one(parse_objective),
        action="append",
        default=[],
        metavar="TEXT",
        help="exit with 1 unless it holds, e.g. 'ttft_p95_ms<=500', "
        "'tetris:2+2@failure_rate<=0', 'ours/vllm@output_tokens_per_s>=0.95'",
    )
    add(
        "--max-client-cpu",
        type=float,
        default=Limits().max_client_cpu,
        metavar="SHARE",
        help="of a core; a client that uses more makes a run invalid (default: "
        "%(default)g)",
    )
    add(
        "--max-lag-ms",
        type=float,
        default=Limits().max_lag_ms,
        metavar="MS",
        help="a client that is later makes a run invalid (default: %(default)g)",
    )
    add(
        "--client-nice",
        type=int,
        metavar="N",
        help="priority of the client, e.g. -10 where it shares cores with the server",
    )
    group = parser.add_argument_group("how")
    add = group.add_argument
    add(
        "--rounds",
        type=read_positive,
        default=3,
        metavar="N",
        help="how often everything is measured (default: %(default)s)",
    )
    add("--minutes", type=read_minutes, metavar="N", help="then exit with 3 if needed")
    add("--soak", action="store_true", help="fail when the server's processes grow")
    add(
        "--chaos",
        type=_one(parse_chaos),
        default="",
        metavar="LIST",
        help="e.g. kill-replica@0.3,kill-engine@0.5,redeploy@0.7,stall@0.1x4=5,"
        "drop@0.2x4: at which part of a run",
    )
    add(
        "--redeploy-command",
        metavar="COMMAND",
        help="for redeploy; {dashboard} stands for Ray's dashboard (default: the same "
        "deployment as a new release, see python -m loadtest.http_bench.redeploy)",
    )
    add("--restart", action="store_true", help="discard what the folder holds")
    add("--report-only", action="store_true", help="measure nothing, write the report")


def _run(options: argparse.Namespace) -> int:
    store = Store(options.output)
    objectives: list[Objective] = options.objective
    if options.restart:
        store.clear()
    complete = options.report_only or _measure(options, store, objectives)
    if not complete and not store.runs():
        sys.stderr.write("\nnothing is measured yet: run the same command again\n")
        return EXIT_MORE_TO_DO
    results = write_results(store, objectives)
    sys.stderr.write(f"\nreport: {write_report(store, results)}\n")
    missed = [one for one in results["objectives"] if not one["is_met"]]
    for one in missed:
        sys.stderr.write(
            f"missed: {one['objective']} in {one['where']}: found {one['found']}"
            f"{' (' + one['note'] + ')' if one['note'] else ''}\n"
        )
    if not complete:
        sys.stderr.write("not everything is measured yet: run the same command again\n")
        return EXIT_MORE_TO_DO
    return EXIT_FAILED if missed else 0


def _measure(
    options: argparse.Namespace, store: Store, objectives: Sequence[Objective]
) -> bool:
    experiment = make_experiment(options)
    launcher = Launcher(
        config=options.config,
        settings=options.set,
        metrics_urls=dict(options.metrics_url),
        logs=store.folder / LOG_FOLDER,
        deployment_pid=options.deployment_pid,
        headers=read_header(options.header),
    )
    return Runner(experiment, store, launcher, objectives).measure(options.minutes)


def make_experiment(options: argparse.Namespace) -> Experiment:
    """Put an experiment together from options.

    Raises:
        LoadTestError: If they do not fit together.
    """
    arms: list[Arm] = [*options.policies, *options.arm]
    if len({arm.name for arm in arms}) < len(arms):
        raise LoadTestError("two arms have the same name; name them with --arm NAME=")
    duration_s = options.duration or (_SOAK_S if options.soak else _DURATION_S)
    if options.lead_in >= duration_s:
        raise LoadTestError(
            f"--lead-in {options.lead_in:g} leaves nothing of --duration {duration_s:g}"
        )
    loads: Sequence[Load] = options.loads
    if options.requests and any(load.is_open for load in loads):
        raise LoadTestError("--requests goes with closed loop; use --duration instead")
    for workload in options.workloads:
        make_workload(workload, "check", options.max_prompt_chars or None)
    read_header(options.header)
    read_extra_body(options.extra_body)
    server_chaos, client_chaos = options.chaos or ((), "")
    check_chaos(
        {action.kind for action in server_chaos},
        arms,
        num_requests=options.requests,
        redeploy_command=options.redeploy_command,
        deployment_pid=options.deployment_pid,
        is_soak=options.soak,
    )
    return Experiment(
        arms=arms,
        cells=[Cell(w, load) for w in options.workloads for load in loads],
        rounds=options.rounds,
        traffic=Traffic(
            model=options.model,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            duration_s=duration_s,
            num_requests=options.requests,
            lead_in_s=0.0 if options.requests else options.lead_in,
            drain_s=options.drain,
            extra_body=options.extra_body,
            header=options.header,
            max_prompt_chars=options.max_prompt_chars,
            processes=options.processes,
            nice=options.client_nice,
        ),
        warm_up_s=options.warm_up,
        targets=Targets(options.ttft_target_ms or None, options.tpot_target_ms or None),
        limits=Limits(options.max_client_cpu, options.max_lag_ms),
        config=options.config,
        settings=options.set,
        server_chaos=server_chaos,
        client_chaos=client_chaos,
        redeploy_command=options.redeploy_command,
        is_soak=options.soak,
    )


def _one(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make an argparse type whose errors keep their words."""

    def read_one(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_one


def _each(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Make an argparse type for a list separated by commas."""
    read_one = _one(read)

    def read_each(text: str) -> tuple[T, ...]:
        return tuple(read_one(part.strip()) for part in text.split(",") if part.strip())

    return read_each


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number from 0 on (got {text})")
    return value


def _read_pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r}: write NAME=URL")
    return name, value
