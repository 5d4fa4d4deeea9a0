"""CPU time per output token by role of process, in the part of a run that counts."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loadtest.client.records import Records
from loadtest.report.rows import CPU_METRICS
from loadtest.report.summary import count_tokens

from .processes import ENGINE_ROLES, RAY_ROLES, CpuTimes, read_cpu_times
from .scrape import repeat

_PERIOD_S = 0.2
"""Looks come so much late at most; tokens are counted between them, as they came."""

Look = tuple[float, CpuTimes]
"""Seconds since the epoch, and what processes had taken by then."""


@contextmanager
def watch_cpu(
    pid: int | None, records: Path, ends_s: tuple[float, float]
) -> Iterator[list[Look]]:
    """Look at what descends from a process twice while a block runs; yield the looks.

    Args:
        pid: None for a server that is not ours, whose processes nobody sees.
        records: Where Locust writes when its run began.
        ends_s: When to look, in seconds of the run.
    """
    looks: list[Look] = []
    # One that was interrupted would tell when that run began.
    records.unlink(missing_ok=True)

    def look() -> None:
        if pid is None or len(looks) == len(ends_s):
            return
        epoch_s = _read_epoch(records)
        if epoch_s is not None and time.time() >= epoch_s + ends_s[len(looks)]:
            looks.append((time.time(), read_cpu_times(pid)))

    with repeat(look, _PERIOD_S):
        yield looks
    look()  # Locust may have ended right after the run.


def _read_epoch(records: Path) -> float | None:
    # The file may not be there yet, or its first line be half written.
    with suppress(OSError, ValueError), records.open() as file:
        return float(json.loads(file.readline())["run"]["epoch_s"])
    return None


def summarise_cpu(looks: Sequence[Look], records: Records) -> dict[str, Any]:
    """Return CPU time in ms per output token, between two looks.

    `cpu_ms_per_token` is that of all processes but engines and Ray's daemons, which
    stand beside it; `cpu_ms_per_token_by_role` has each role's. A process that ends in
    between is in none. Without two looks or tokens there is no figure: None.
    """
    figures: dict[str, Any] = dict.fromkeys(CPU_METRICS)
    taken, tokens = defaultdict[str, float](float), 0.0
    if len(looks) == 2 and records.epoch_s is not None:
        (begin_s, before), (end_s, after) = looks
        span = begin_s - records.epoch_s, end_s - records.epoch_s
        tokens = count_tokens(records.outcomes, *span)
        for process, (role, cpu_s) in after.items():
            taken[role] += cpu_s - before.get(process, (role, 0.0))[1]
    by_role = {role: 1e3 * cpu_s / tokens for role, cpu_s in taken.items() if tokens}
    if by_role:
        engine, ray = (
            sum(ms for role, ms in by_role.items() if role in roles)
            for roles in (ENGINE_ROLES, RAY_ROLES)
        )
        outside = sum(by_role.values()) - engine - ray
        figures = dict(zip(CPU_METRICS, (outside, engine, ray), strict=True))
    return {**figures, "cpu_ms_per_token_by_role": by_role}
