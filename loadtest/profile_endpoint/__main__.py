"""Finds where a running deployment's CPU time goes.

    tetris-serve up &
    tetris-serve bench http --arm ours=http://127.0.0.1:8000 --loads closed:8 ... &
    python -m loadtest.profile_endpoint --seconds 30 --output results/scratch/profile

Samples the Python stacks of proxy, ingress, replicas and engines with py-spy, and tells
for each process how much CPU time went where: `profile.txt`, `profile.json`, and
py-spy's own files for flame graphs. A thread's CPU time comes from the kernel and is
shared out by its samples, which in all but the engine are those in which it held the
interpreter's lock; a stack belongs to the innermost frame that has a group, except that
all beneath the drafter is the drafter's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadtest.engine_bench.argument_types import read_positive
from loadtest.engine_bench.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
)
from loadtest.http_bench.errors import LoadTestError

from .sampling import find_deployment, profile
from .table import format_profiles


def main(arguments: Sequence[str] | None = None) -> int:
    """Take a profile; returns the exit code, 1 for what cannot be sampled."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.profile_endpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=read_positive, default=30, metavar="S", help="default: 30")
    add("--rate", type=read_positive, default=50, metavar="HZ", help="default: 50")
    add(
        "--pid",
        type=int,
        help="the process that all of the deployment descends from, e.g. `tetris-serve "
        "up` (default: every deployment on this machine)",
    )
    add("--output", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        profiles = profile(
            find_deployment(options.pid),
            options.seconds,
            options.rate,
            options.output / "stacks",
        )
    except LoadTestError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    text = format_profiles(profiles)
    written = {
        "environment": {
            "machine": describe_machine(),
            "versions": describe_versions(),
            **describe_piece(),
        },
        "seconds": options.seconds,
        "rate_hz": options.rate,
        "processes": [asdict(one) for one in profiles],
    }
    (options.output / "profile.json").write_text(json.dumps(written, indent=1) + "\n")
    (options.output / "profile.txt").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
