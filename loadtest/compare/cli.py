"""Command line: ``tetris-serve bench http --help``."""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.argument_types import each, one, read_positive
from loadtest.bench_command import (
    load_presets,
    make_parser,
    read_options,
    run_benchmark,
    say,
)
from loadtest.load.arrivals import parse_load
from loadtest.load.options import HEADER_VARIABLE, OPTIONS, add_option
from loadtest.report.objectives import parse_objective
from loadtest.report.page import write_page, write_results
from loadtest.report.summary import Limits

from .arms import parse_arm
from .runner import SENT, Runner, Store
from .stopping import measure_until

PRESETS = load_presets(Path(__file__).with_name("presets.yaml"))
_DURATION_S = 60.0
_SOAK_S = 3600.0


def main(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench http"
) -> int:
    """Run an experiment; with an objective missed the status is 1."""
    options = parse_options(arguments, prog)
    report = partial(_report, options)
    return run_benchmark(options, Store, _measure, report)


def parse_options(
    arguments: Sequence[str] | None = None, prog: str = "tetris-serve bench http"
) -> argparse.Namespace:
    """Read the command line; what is not given comes from the preset."""
    parser = _make_parser(prog)
    options = read_options(parser, arguments, PRESETS, lambda given: given.preset)
    # Not a default, which help would show.
    options.header = options.header or os.environ.get(HEADER_VARIABLE, "")
    options.duration = options.duration or (_SOAK_S if options.soak else _DURATION_S)
    options.arms = [*options.policies, *options.arm]
    if not options.arms:
        parser.error("give --policies, --arm or --preset: there is nothing to measure")
    return options


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = make_parser(
        prog,
        "Put load on OpenAI-compatible endpoints and compare them. Every arm is "
        "started,\nwarmed up, measured and stopped in turn, round by round. "
        "Interrupted, the same\ncommand goes on where it was.",
        PRESETS,
    )
    add = parser.add_argument

    def add_list(name: str, text: str, read: Callable[[str], Any] = str) -> None:
        told: dict[str, Any] = {"help": f"{text} (repeatable)", "metavar": "TEXT"}
        add(name, action="append", default=[], type=one(read), **told)

    text = "served by tetris-serve up, e.g. none,fixed:3,tetris:2+2"
    add("--policies", type=each(parse_arm), default=(), metavar="TEXT", help=text)
    add_list(
        "--arm",
        "NAME=http://host:port of a server that runs, NAME='cmd:vllm serve ... --port "
        "{port}' of one to start, NAME=POLICY, or NAME=vllm:POLICY for none or fixed:K "
        "served by vLLM alone",
        parse_arm,
    )
    text = "deployment file of the policies"
    add("--config", default="configs/tiny.yaml", metavar="TEXT", help=text)
    add_list("--set", "replace a setting in it, e.g. replicas.max=3")
    text = (
        "PROCESS:SHAPE,... Processes: closed (requests in flight), or arrivals a "
        "second: paced, poisson, gamma=CV (bursts). Shapes: 8, ramp:1-32, spike:4-32, "
        "diurnal:1-8"
    )
    add("--loads", type=each(parse_load), default="closed:8", metavar="TEXT", help=text)
    text = f"{OPTIONS['workload'].metadata['help']}: ShareGPT, or lines of prompts"
    add("--workloads", type=each(str), default="mixed", metavar="TEXT", help=text)
    duration = f"of sending (default: {_DURATION_S:g}, with --soak {_SOAK_S:g})"
    own: dict[str, dict[str, Any]] = {
        "duration": {"default": None, "help": duration},
        "ttft_target_ms": {"default": 1000.0},
        "tpot_target_ms": {"default": 100.0},
    }
    for name in (*SENT, "header"):
        add_option(parser, name, **own.get(name, {}))
    limits = Limits()
    for name, value, text in (
        ("--lead-in", 5.0, "seconds left out of every run"),
        ("--warm-up", 10.0, "seconds of load after a start, thrown away"),
        ("--max-client-cpu", limits.max_client_cpu, "cores; above, a run is invalid"),
        ("--max-lag-ms", limits.max_lag_ms, "of the client; above, a run is invalid"),
    ):
        add(name, type=float, default=value, help=f"{text} (default: {value:g})")
    add("--processes", type=read_positive, default=1, help="of the client")
    text = "e.g. -10 where it shares cores with the server"
    add("--client-nice", type=int, help=text)
    add_list(
        "--objective",
        "exit with 1 unless it holds, e.g. 'ttft_p95_ms<=500', "
        "'tetris:2+2@failure_rate<=0', 'ours/vllm@output_tokens_per_s>=0.95'",
        parse_objective,
    )
    add("--rounds", type=read_positive, default=3, help="of all arms (default: 3)")
    add(
        "--until-half-width",
        type=float,
        metavar="WIDTH",
        help="after every fourth round, stop where the 95 %% intervals of tokens/s of "
        "our policies over the same under vLLM alone are so narrow",
    )
    add("--soak", action="store_true", help="fail when the server's processes grow")
    # None if it is not given, as in what was measured before there was the option.
    text = "look at the server only before and after runs; Ray's metrics as by default"
    add("--unwatched", action="store_true", default=None, help=text)
    return parser


def _measure(options: argparse.Namespace, store: Store) -> bool:
    return measure_until(Runner(options, store), store, options)


def _report(options: argparse.Namespace, store: Store) -> bool:
    runs = store.runs()
    results = write_results(store, runs, options.objective)
    say(f"\nreport: {write_page(store, runs, results)}")
    missed = [verdict for verdict in results["objectives"] if not verdict["is_met"]]
    for verdict in missed:
        note = f" ({verdict['note']})" if verdict["note"] else ""
        found = f"found {verdict['found']}{note}"
        say(f"missed: {verdict['objective']} in {verdict['where']}: {found}")
    return not missed
