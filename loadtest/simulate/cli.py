"""Command line: ``tetris-serve simulate --help``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.argument_types import read_positive
from loadtest.interrupts import interruptible

from .autoscale import AGE_S, SCALERS, Growth, parse_scaler
from .compare import Plan, compare, expect
from .engine import MODELS, load_engine
from .fleet import (
    LEAST_REQUESTS,
    PIECES,
    PREFIX_ROUTERS,
    ROUTERS,
    Targets,
    find_speed,
)
from .load import Arrivals, Lengths, Load, find_own_rate, parse_arrivals, read_load
from .output import describe, render, write_json
from .readers import number, read_depth, read_shares, read_slow
from .recorded import read_folder
from .scenario import parse_options
from .sessions import parse_sessions
from .state import ALL, WORTH

_USUAL_UTILISATION = 0.8
_USUAL_AGE_MS = 100.0
_FEWEST_DELAYS = 3

_EXAMPLES = """\
examples:
  what is compared, from a file, with a page of plots:
    tetris-serve simulate configs/scenarios/stale-telemetry.yaml --html page.html
  what ten times the traffic costs in replicas, replica-hours and attainment:
    tetris-serve simulate --deployment configs/llama-3.1-8b.yaml --rate 40 \\
        --requests 100000 --scale-load 1 --scale-load 10
"""

_HELP = {
    "deployment": "settings as `tetris-serve up` takes them, or a chart's values, in "
    "place of --batch, --drafts, --select, --autoscaler and its limits",
    "engine": f"{', '.join(MODELS)}, or a file like theirs (%(default)s)",
    "replicas": "in the fleet, or up to which it grows (%(default)s)",
    "requests": "a seed (%(default)s)",
    "router": "an arm; repeat it to compare with the first (default: all but "
    "prefix-affinity, which without shared prefixes is power-of-two-sent)",
    "autoscaler": "an arm that grows and shrinks up to --replicas, in place of "
    f"routers: {', '.join(SCALERS)}; the target is requests of a replica for the "
    "first, ms between two tokens for the others",
    "min-replicas": "down to which it shrinks (%(default)s)",
    "start-s": "seconds that a replica takes to start (%(default)g)",
    "upscale-delay-s": "seconds of high load before an autoscaler adds replicas "
    "(%(default)g)",
    "downscale-delay-s": "seconds of low load before it takes some away (%(default)g)",
    "load": "poisson, gamma=CV (bursts), diurnal=SWING (peak over night); poisson",
    "trace": "Azure's or BurstGPT's .csv, or Mooncake's .jsonl, in place of --load and "
    "lengths, at the rate that is asked for",
    "sessions": "requests belong to sessions of TURNS on average, THINK_S (10) apart: "
    "prompts carry all before, behind SYSTEM (0) tokens that their kind has in common; "
    "lengths are what a turn adds",
    "rate": "of requests",
    "utilisation": "rate over what the fleet finishes with all batches full "
    f"({_USUAL_UTILISATION:g}; of a --trace its own rate)",
    "scale-load": "so many times the traffic: rate, requests, and --replicas that "
    "autoscalers may take. Repeat it for the cost or attainment of each (1)",
    "staleness-ms": f"age of telemetry; repeat it to compare ages ({_USUAL_AGE_MS:g})",
    "seeds": "runs of an arm (%(default)s)",
    "slow-replicas": "whose steps take TIMES (2) as long, as beside a neighbour "
    "(%(default)s)",
    "prompt-tokens": "mean (%(default)g)",
    "output-tokens": "mean (%(default)g)",
    "length-cv": "coefficient of variation of both, lognormal (%(default)g)",
    "hard-share": "of hard requests; LATER holds for the second half (%(default)s)",
    "drafts": "of a request in a step, at most (%(default)s)",
    "select": "draft as deep and verify as many as is worth its time, as goodput does; "
    "else all",
    "recorded": "drafts of fixed length that bench engine has traced (*.npz), in place "
    "of chances: traces in which less is accepted are of hard requests",
    "batch": "requests in a step (the engine's own)",
    "ttft-target-ms": "of goodput (%(default)g)",
    "tpot-target-ms": "of goodput (%(default)g)",
    "json": "write settings and results to it",
    "html": "and a page with plots to this one",
}

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


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
    try:
        given = sys.argv[1:] if arguments is None else arguments
        options = parse_options(_make_parser(prog), given)
        with interruptible():
            plans = _make_plans(options)
            _check_outputs(options)
            pieces = PIECES * len(plans) * len(plans[0].seeds)
            progress = expect(dict.fromkeys(plans[0].arms, pieces))
            found = [(plan, compare(plan, progress)) for plan in plans]
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
    sys.stdout.write("\n".join(render(*one) for one in found))
    named = {"scenario": options.scenario, "deployment": options.deployment}
    described = describe(found, {k: str(v) for k, v in named.items() if v})
    if options.json:
        write_json(options.json, described)
        sys.stderr.write(f"results are in {options.json}\n")
    if options.html:
        from .page import render_page

        options.html.write_text(render_page(described), "utf-8")
        sys.stderr.write(f"the page is in {options.html}\n")
    return 0


def _make_plans(options: argparse.Namespace) -> list[Plan]:
    counts = {
        # A trace ends, whatever its rate.
        times: round(options.requests * (1.0 if options.trace else times))
        for times in options.scale_load or [1.0]
    }
    if min(counts.values()) < LEAST_REQUESTS:
        raise ValueError(
            f"{min(counts.values())} requests, --requests times --scale-load: "
            f"take {LEAST_REQUESTS} or more"
        )
    engine = load_engine(
        *(options.engine, options.drafts, options.batch),
        WORTH if options.select else ALL,
        read_folder(options.recorded) if options.recorded else None,
    )
    if options.trace and (options.load or options.sessions):
        raise ValueError("--trace says when who comes: leave out --load and --sessions")
    load = (
        read_load(options.trace, *options.hard_share)
        if options.trace
        else Load(
            options.load or Arrivals(),
            Lengths(options.prompt_tokens, options.length_cv),
            Lengths(options.output_tokens, options.length_cv),
            *(*options.hard_share, "", options.sessions),
        )
    )
    rate_per_s = options.rate
    if rate_per_s is None:
        share = options.utilisation or _USUAL_UTILISATION
        speed = find_speed(options.replicas, options.slow_replicas)
        rate_per_s = share * speed * engine.capacity_per_s(load)
    if options.trace:
        # Found out before the work: a trace ends.
        own_per_s = find_own_rate(load, options.requests)
        if options.rate is None and options.utilisation is None:
            rate_per_s = own_per_s
    scaler = options.autoscaler
    if scaler and (options.router or options.slow_replicas[0] or options.staleness_ms):
        raise ValueError(
            "--autoscaler is an arm of its own: its requests go to the better of two, "
            "replicas alike; leave out --router, --slow-replicas and --staleness-ms"
        )
    if options.min_replicas > options.replicas:
        raise ValueError(
            f"--min-replicas {options.min_replicas}: there are {options.replicas} "
            "--replicas at most"
        )
    plan = Plan(
        engine=engine,
        load=load,
        num_replicas=options.replicas,
        num_requests=options.requests,
        rate_per_s=rate_per_s,
        staleness_s=AGE_S,
        targets=Targets(options.ttft_target_ms, options.tpot_target_ms),
        arms=list(dict.fromkeys(scaler or options.router or ROUTERS)),
        seeds=range(options.seeds),
        slow=options.slow_replicas,
    )
    scaled = {
        times: replace(plan, num_requests=count, rate_per_s=times * rate_per_s)
        for times, count in counts.items()
    }
    if scaler:
        return [_grow(one, times, options) for times, one in scaled.items()]
    return [
        replace(one, staleness_s=age_ms / 1e3)
        for one in scaled.values()
        for age_ms in options.staleness_ms or [_USUAL_AGE_MS]
    ]


def _grow(plan: Plan, times: float, options: argparse.Namespace) -> Plan:
    """Return the plan of a fleet that grows: with more traffic, it may grow further.

    It begins with what its mean rate takes, so that no start of it all is measured.
    """
    most = math.ceil(plan.num_replicas * max(times, 1.0))
    duration_s = plan.num_requests / plan.rate_per_s
    if duration_s < _FEWEST_DELAYS * options.downscale_delay_s:
        sys.stderr.write(
            f"note: {duration_s:.0f} s are short beside --downscale-delay-s "
            f"{options.downscale_delay_s:g}; take more --requests\n"
        )
    served_per_s = _USUAL_UTILISATION * plan.engine.capacity_per_s(plan.load)
    first = max(options.min_replicas, math.ceil(plan.rate_per_s / served_per_s))
    growth = Growth(
        most=most,
        least=options.min_replicas,
        first=min(first, most),
        start_s=options.start_s,
        up_delay_s=options.upscale_delay_s,
        down_delay_s=options.downscale_delay_s,
    )
    return replace(plan, num_replicas=most, growth=growth)


def _check_outputs(options: argparse.Namespace) -> None:
    """Find out before the work whether its results can be written."""
    for name, path in (("json", options.json), ("html", options.html)):
        if path is None:
            continue
        try:
            is_there = path.exists()
            path.open("a").close()
            if not is_there:
                path.unlink()
        except OSError as error:
            message = f"--{name} {path}: cannot be written ({error.strerror})"
            raise ValueError(message) from error


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare routers or autoscalers on a simulated fleet: goodput,\n"
        "attainment, times to the first token (TTFT) and per token after it (TPOT).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "scenario",
        nargs="?",
        type=Path,
        help="YAML file of options, without dashes; those given beside it count more",
    )

    def add(
        name: str,
        read: Callable[[str], Any],
        default: Any = None,
        metavar: str | None = None,
        to: Any = parser,
        **more: Any,
    ) -> None:
        more |= {"type": read, "default": default, "metavar": metavar}
        to.add_argument(f"--{name}", help=_HELP[name], **more)

    above_0 = number(1e-6)
    add("deployment", Path, metavar="FILE")
    add("engine", str, "h100-qwen3-1.7b")
    add("replicas", read_positive, 64, "N")
    add("requests", read_positive, 20_000, "M")
    add("router", str, action="append", choices=ROUTERS | PREFIX_ROUTERS)
    add("autoscaler", parse_scaler, metavar="NAME:TARGET", action="append")
    add("min-replicas", read_positive, 1, "N")
    add("start-s", number(0), 60.0, "S")
    add("upscale-delay-s", number(0), 10.0, "S")
    add("downscale-delay-s", number(0), 300.0, "S")
    add("load", parse_arrivals)
    add("trace", Path, metavar="FILE")
    add("sessions", parse_sessions, metavar="TURNS[:THINK_S[:SYSTEM]]")
    rate = parser.add_mutually_exclusive_group()
    add("rate", above_0, metavar="PER_S", to=rate)
    add("utilisation", number(1e-6, 10), metavar="SHARE", to=rate)
    add("scale-load", above_0, metavar="TIMES", action="append")
    add("staleness-ms", number(0), metavar="MS", action="append")
    add("seeds", read_positive, 5, "N")
    add("slow-replicas", read_slow, "0", "SHARE[:TIMES]")
    add("prompt-tokens", number(1), 300.0)
    add("output-tokens", number(1), 200.0)
    add("length-cv", number(0, 10), 1.0)
    add("hard-share", read_shares, "0.5", "SHARE[:LATER]")
    add("drafts", read_depth, 3)
    parser.add_argument(
        *("--select",), action=argparse.BooleanOptionalAction, help=_HELP["select"]
    )
    add("recorded", Path, metavar="DIR")
    add("batch", read_positive)
    add("ttft-target-ms", above_0, 500.0)
    add("tpot-target-ms", above_0, 10.0)
    add("json", Path, metavar="FILE")
    add("html", Path, metavar="FILE")
    return parser
