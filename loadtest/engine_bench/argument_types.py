"""Readers of command-line values; their errors say what would be right."""

from __future__ import annotations

import argparse
import os
import re

from .arms import Arm, parse_bench_arm
from .closed_loop import min_requests
from .workloads import WORKLOADS

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9}


def read_arms(text: str) -> tuple[Arm, ...]:
    """Read policies."""
    try:
        arms = tuple(parse_bench_arm(name) for name in _split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(set(arms)) < len(arms):
        raise argparse.ArgumentTypeError(f"{text!r} names a policy twice")
    return arms


def read_workloads(text: str) -> tuple[str, ...]:
    """Read workloads."""
    names = _split(text)
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: no such workload; choose from "
            f"{', '.join(WORKLOADS)}"
        )
    return names


def read_temperatures(text: str) -> tuple[float, ...]:
    """Read temperatures."""
    try:
        values = tuple(float(value) for value in _split(text))
    except ValueError:
        values = (-1.0,)
    if min(values) < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers from 0 up; write e.g. 0,1"
        )
    return values


def read_concurrencies(text: str) -> tuple[int, ...]:
    """Read numbers of requests in flight."""
    return tuple(read_positive(value) for value in _split(text))


def read_positive(text: str) -> int:
    """Read a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def read_requests_per_slot(text: str) -> int:
    """Read a whole number that leaves a steady part."""
    if not text.isdecimal() or int(text) < min_requests(1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from {min_requests(1)} up: with fewer no "
            "part of the run is steady"
        )
    return int(text)


def read_minutes(text: str) -> float:
    """Read a time limit."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if minutes <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


def read_parameters(text: str) -> int:
    """Read a parameter count such as 100M."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    digits = text[:-1] if factor != 1.0 else text
    try:
        return int(float(digits) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no count; write e.g. 100M, or 0 for the target as it is"
        ) from None


def read_cpus(text: str) -> tuple[int, ...]:
    """Read a list of cores such as 0,1 or 0-3."""
    cpus: set[int] = set()
    for part in _split(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no list like 0,1 or 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        cpus.update(range(first, last + 1))
    allowed = os.sched_getaffinity(0)
    if not cpus or not cpus <= allowed:
        raise argparse.ArgumentTypeError(
            f"{text!r}: this process may use cores {sorted(allowed)}"
        )
    return tuple(sorted(cpus))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
