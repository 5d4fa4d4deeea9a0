"""A profile as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from .sampling import ProcessProfile

_SHOWN_SHARE = 0.005
_NUM_FUNCTIONS = 5
_IDLE_CORES = 0.05


def format_profiles(profiles: Sequence[ProcessProfile]) -> str:
    """Return a table for each sampled process, and a line for the others."""
    lines: list[str] = []
    for one in profiles:
        if one.num_samples:
            lines += [*_format_process(one), ""]
    rest: defaultdict[str, float] = defaultdict(float)
    for one in profiles:
        if not one.num_samples:
            rest[one.role] += one.cores
    if rest:
        parts = ", ".join(f"{role} {cores:.2f}" for role, cores in rest.items())
        lines += [f"without samples, in cores: {parts}", ""]
    total = sum(one.cores for one in profiles)
    lines.append(f"all processes: {total:.2f} cores")
    if total < _IDLE_CORES:
        lines.append("The deployment was idle: put load on it first.")
    return "\n".join(lines) + "\n"


def _format_process(one: ProcessProfile) -> Iterator[str]:
    yield f"{one.role} (process {one.pid}): {one.cores:.2f} cores"
    for name, cores in one.groups.items():
        if cores >= _SHOWN_SHARE * one.cores:
            yield f"  {_share(cores, one)}  {cores:5.2f}  {name}"
    yield "  most of it in"
    for name, cores in list(one.functions.items())[:_NUM_FUNCTIONS]:
        yield f"  {_share(cores, one)}  {cores:5.2f}  {name}"


def _share(cores: float, one: ProcessProfile) -> str:
    return f"{cores / one.cores if one.cores else 0.0:6.1%}"
