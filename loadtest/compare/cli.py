"""Command line: ``tetris-serve bench http --help``."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from loadtest.client.errors import LoadTestError
from loadtest.engine_bench.argument_types import read_minutes, read_positive
from loadtest.load.arrivals import parse_load
from loadtest.load.options import HEADER_VARIABLE, LoadOptions, read_header
from loadtest.load.workloads import GENERATED, make_workload
from loadtest.report.objectives import parse_objective
from loadtest.report.page import write_page, write_results
from loadtest.report.summary import Limits, Targets

from .arms import parse_arm
from .chaos import check_chaos, parse_chaos
from .deployment import Launcher
from .experiment import Cell, Experiment
from .presets import PRESETS
from .runner import Runner
from .store import LOG_FOLDER, Store

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
        values = dict(PRESETS[preset][1])
        # argparse reads texts of defaults, but not those in lists.
        values["arm"] = [parse_arm(text) for text in values.get("arm", ())]
        parser.set_defaults(**values)
    options = parser.parse_args(arguments)
    # Not a default, which help would show.
    options.header = options.header or os.environ.get(HEADER_VARIABLE, "")
    if not options.report_only and not (options.policies or options.arm):
        parser.error("give --policies, --arm or --preset: there is nothing to measure")
    return options


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog=prog or "python -m loadtest.compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Put load on OpenAI-compatible endpoints and compare them. Every arm is "
            "started,\nwarmed up, measured and stopped in turn, round by round. "
            "Interrupted, the same\ncommand goes on where it was."
        ),
        epilog="presets:\n"
        + "\n".join(f"  {name:<10}{text}" for name, (text, _) in PRESETS.items()),
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--preset", choices=PRESETS, help="values for other options")

    def group(title: str, text: str | None = None) -> Callable[..., None]:
        return functools.partial(_add, parser.add_argument_group(title, text))

    _add_arms(group("what is compared"))
    _add_load(
        group(
            "load",
            "PROCESS:SHAPE. Processes: closed (requests in flight), or arrivals a "
            "second: paced, poisson, gamma=CV (bursts). Shapes: 8, ramp:1-32, "
            "ladder:4-16x4, spike:4-32, diurnal:1-8x2.",
        )
    )
    _add_verdict(group("targets and verdict"))
    _add_how(group("how"))
    for name, text in (
        ("--soak", "fail when the server's processes grow"),
        ("--restart", "discard what the folder holds"),
        ("--report-only", "measure nothing, write the report"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    return parser


def _add(
    group: Any, name: str, text: str, default: Any, metavar: str, **more: Any
) -> None:
    """Add an option; the type of seconds, shares and counts goes by their metavar."""
    if default not in (None, "", "{}", [], ()):
        text += f" (default: {default})"
    number = dict.fromkeys(("S", "MS", "SHARE"), _seconds) | {"N": read_positive}
    told = {"type": number.get(metavar, str), "default": default, "help": text}
    group.add_argument(name, metavar=metavar, **told | more)


def _add_arms(add: Callable[..., None]) -> None:
    policies = "served by tetris-serve up, e.g. none,fixed:3,tetris:2+2,goodput:8"
    add("--policies", policies, (), "LIST", type=_each(parse_arm))
    add(
        "--arm",
        "one more arm: NAME=http://host:port of a server that runs, NAME='cmd:vllm "
        "serve ... --port {port}' of one to start, NAME=POLICY, or NAME=vllm:POLICY "
        "for none or fixed:K served by vLLM alone",
        *([], "NAME=WHAT"),
        type=_one(parse_arm),
        action="append",
    )
    config = "deployment file of the policies"
    add("--config", config, "configs/demo.yaml", "FILE")
    setting = "replace a setting in it, e.g. replicas.max=3 (repeatable)"
    add("--set", setting, [], "NAME=VALUE", action="append")
    page = "Prometheus page of an arm that runs already (default: its /metrics)"
    pair = {"type": _one(_read_pair), "action": "append"}
    add("--metrics-url", page, [], "NAME=URL", **pair)
    pid = "of an arm that runs already on this machine, for --chaos and --soak"
    add("--deployment-pid", pid, None, "PID", type=read_positive)


def _add_load(add: Callable[..., None]) -> None:
    add("--loads", "what is sent when", "closed:8", "LIST", type=_each(parse_load))
    workloads = (
        f"of {', '.join(GENERATED)}, or files: ShareGPT .json or .jsonl, or one prompt "
        "a line"
    )
    add("--workloads", workloads, "mixed", "LIST", type=_each(str))
    duration = f"of every run (default: {_DURATION_S:g}; with --soak {_SOAK_S:g})"
    add("--duration", duration, None, "S")
    add("--lead-in", "left out of every run", 5.0, "S")
    add("--warm-up", "of load after a start, thrown away", 10.0, "S")
    add("--requests", "send as many in every run, in closed loop", 0, "N")
    add("--drain", "to finish requests after a run", 60.0, "S")
    add("--max-tokens", "longest reply", 128, "N")
    add("--max-prompt-chars", "leave out longer conversations of a file", 0, "N")
    add("--temperature", "of sampling", 0.0, "T", type=float)
    add("--seed", "of prompts and arrivals", 0, "NUMBER", type=int)
    add("--model", "name to ask for; by default the first one listed", "", "NAME")
    add("--extra-body", "more of each request", "{}", "JSON")
    header = f"e.g. an API key; also from the variable {HEADER_VARIABLE}"
    add("--header", header, "", "NAME: VALUE")
    add("--processes", "processes of the client", 1, "N")


def _add_verdict(add: Callable[..., None]) -> None:
    spoils, limits = "a client that {} makes a run invalid", Limits()
    ttft = "longest time to first token that counts as goodput; 0 for any"
    add("--ttft-target-ms", ttft, 1000.0, "MS")
    tpot = "longest time per output token; 0 for any"
    add("--tpot-target-ms", tpot, 100.0, "MS")
    busy = spoils.format("uses more of a core")
    add("--max-client-cpu", busy, limits.max_client_cpu, "SHARE")
    add("--max-lag-ms", spoils.format("is later"), limits.max_lag_ms, "MS")
    nice = "priority of the client, e.g. -10 where it shares cores with the server"
    add("--client-nice", nice, None, "NICE", type=int)
    add(
        "--objective",
        "exit with 1 unless it holds, e.g. 'ttft_p95_ms<=500', "
        "'tetris:2+2@failure_rate<=0', 'ours/vllm@output_tokens_per_s>=0.95'",
        *([], "TEXT"),
        type=_one(parse_objective),
        action="append",
    )


def _add_how(add: Callable[..., None]) -> None:
    add("--rounds", "how often everything is measured", 3, "N")
    add("--minutes", "then exit with 3 if needed", None, "MIN", type=read_minutes)
    chaos = (
        "e.g. kill-replica@0.3,kill-engine@0.5,redeploy@0.7,stall@0.1x4=5,drop@0.2x4: "
        "at which part of a run"
    )
    add("--chaos", chaos, "", "LIST", type=_one(parse_chaos))
    redeploy = (
        "for redeploy; {dashboard} stands for Ray's dashboard (default: the same "
        "deployment as a new release, see python -m loadtest.compare.redeploy)"
    )
    add("--redeploy-command", redeploy, None, "COMMAND")


def _run(options: argparse.Namespace) -> int:
    store = Store(options.output)
    if options.restart:
        store.clear()
    is_complete = options.report_only or _measure(options, store)
    runs = store.runs()
    if not is_complete and not runs:
        sys.stderr.write("\nnothing is measured yet: run the same command again\n")
        return EXIT_MORE_TO_DO
    results = write_results(store, runs, options.objective)
    sys.stderr.write(f"\nreport: {write_page(store, runs, results)}\n")
    missed = [one for one in results["objectives"] if not one["is_met"]]
    for one in missed:
        sys.stderr.write(
            f"missed: {one['objective']} in {one['where']}: found {one['found']}"
            f"{' (' + one['note'] + ')' if one['note'] else ''}\n"
        )
    if not is_complete:
        sys.stderr.write("not everything is measured yet: run the same command again\n")
        return EXIT_MORE_TO_DO
    return EXIT_FAILED if missed else 0


def _measure(options: argparse.Namespace, store: Store) -> bool:
    experiment = make_experiment(options)
    launcher = Launcher(
        logs=store.folder / LOG_FOLDER,
        config=options.config,
        settings=options.set,
        metrics_urls=dict(options.metrics_url),
        deployment_pid=options.deployment_pid,
        headers=read_header(options.header),
    )
    runner = Runner(experiment, store, launcher, options.objective)
    return runner.measure(options.minutes)


def make_experiment(options: argparse.Namespace) -> Experiment:
    """Put an experiment together from options.

    Raises:
        LoadTestError: If they do not fit together.
    """
    arms = [*options.policies, *options.arm]
    if len({arm.name for arm in arms}) < len(arms):
        raise LoadTestError("two arms have the same name; name them with --arm NAME=")
    duration_s = options.duration or (_SOAK_S if options.soak else _DURATION_S)
    if options.lead_in >= duration_s:
        raise LoadTestError(
            f"--lead-in {options.lead_in:g} leaves nothing of --duration {duration_s:g}"
        )
    server_chaos, client_chaos = options.chaos or ((), "")
    sent = LoadOptions(
        host="-",
        model=options.model,
        duration=duration_s,
        requests=options.requests,
        drain=options.drain,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=str(options.seed),
        ttft_target_ms=options.ttft_target_ms,
        tpot_target_ms=options.tpot_target_ms,
        extra_body=options.extra_body,
        max_prompt_chars=options.max_prompt_chars,
        client_chaos=client_chaos,
        header=options.header,
    )
    for load in options.loads:
        replace(sent, load=load.name).check()
    for workload in options.workloads:
        make_workload(workload, "check", options.max_prompt_chars or None)
    check_chaos(
        {action.kind for action in server_chaos},
        arms,
        requests=options.requests,
        redeploy_command=options.redeploy_command,
        deployment_pid=options.deployment_pid,
        is_soak=options.soak,
    )
    return Experiment(
        arms=arms,
        cells=[Cell(w, load) for w in options.workloads for load in options.loads],
        rounds=options.rounds,
        options=sent,
        lead_in_s=0.0 if options.requests else options.lead_in,
        warm_up_s=options.warm_up,
        processes=options.processes,
        nice=options.client_nice,
        targets=Targets(options.ttft_target_ms or None, options.tpot_target_ms or None),
        limits=Limits(options.max_client_cpu, options.max_lag_ms),
        config=options.config,
        settings=options.set,
        server_chaos=server_chaos,
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
