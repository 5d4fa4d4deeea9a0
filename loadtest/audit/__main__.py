"""Compare an audit with what it is about: `python -m loadtest.audit --help`."""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench_command import run_command, say
from loadtest.engine.cli import find_pair
from loadtest.engine.models import pad
from loadtest.engine.plan import Cell, parse_bench_arm
from loadtest.engine.workloads import RequestMaker
from loadtest.environment import REPO, describe_run
from loadtest.models.recipe import DRAFT_DIR, TARGET_DIR

from .cells import WAYS, Bench, write_untrained
from .show import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that are not in the folder yet."""
    options = _parse(arguments)
    return run_command(lambda: (_run(options), True))


def _run(options: argparse.Namespace) -> bool:
    find_pair(options)
    file = options.output / "measurements.jsonl"
    options.output.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    draft = options.draft
    if options.untrained:
        draft = write_untrained(options.draft, REPO / ".cache" / "untrained")
    bench = Bench(
        target=pad(options.target, int(options.target_parameters))
        if options.target_parameters
        else options.target,
        draft=draft,
        arm=parse_bench_arm(options.policy),
        audit=options.audit,
        max_tokens=options.max_tokens,
        ways=options.ways,
        rounds=options.rounds,
        blocks=options.blocks,
        warm_up_rounds=options.warm_up_rounds,
        most=max(options.concurrency),
        logs=options.output / "logs",
    )
    requests = RequestMaker.load(options.target, options.seed, options.max_tokens)
    done = {(row["cell"], row["policy"], row["draft"]) for row in rows}
    for workload, concurrency in itertools.product(
        options.workloads, options.concurrency
    ):
        cell = Cell(workload, options.temperature, concurrency)
        is_done = (cell.name, options.policy, draft.name) in done
        if not (is_done or options.report_only):
            say(f"{cell.name}: engines start")
            row = {"cell": cell.name, "policy": options.policy, "draft": draft.name}
            row |= {"audit": options.audit, **describe_run()}
            row |= bench.measure(cell, requests, say)
            rows.append(row)
            with file.open("a") as kept:
                kept.write(json.dumps(row) + "\n")
    text = render(rows)
    (options.output / "results.md").write_text(text)
    say(text)
    return True


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.audit",
        description="Runs the same requests under a policy with its audit, under the "
        "policy by itself, at depth 0 in the same engine, and in an engine without a "
        "drafter, block by block in turn. What the audit says is held against what "
        "these show. The same command goes on where it was.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR")
    add("--policy", default="goodput:8", help="goodput:8, fixed:3, ...")
    add("--audit", type=float, default=0.1, help="share of audited steps")
    add("--untrained", action="store_true", help="with a drafter of random weights")
    add("--workloads", nargs="+", default=["easy", "hard"])
    add("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    add("--temperature", type=float, default=0.0)
    add("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="some twice or more")
    add("--rounds", type=int, default=5, help="of all ways, in turn")
    add("--blocks", type=int, default=4, help="of requests, answered in one go")
    add("--warm-up-rounds", type=int, default=1, help="before, audited")
    add("--max-tokens", type=int, default=128)
    add("--target", type=Path, default=TARGET_DIR)
    add("--draft", type=Path, default=DRAFT_DIR)
    add("--target-parameters", type=float, default=100e6, help="0 pads none")
    add("--seed", type=int, default=0)
    add("--report-only", action="store_true")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    return options


if __name__ == "__main__":
    sys.exit(main())
