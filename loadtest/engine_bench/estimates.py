"""Verdicts on what a policy believes, and on what believing costs: aim 5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .store import cell_of
from .verdict import MET, MISSED, NOT_DECIDED, Verdict
from .workloads import is_drifting

MOST_CALIBRATION_ERROR, MOST_STEP_TIME_ERROR = 0.03, 0.10
MOST_PLANNING_US, PLANNING_AT_REQUESTS = 200.0, 64

_BY_SEVERITY = (MET, NOT_DECIDED, MISSED)

Row = Mapping[str, Any]


def judge_estimates(
    rows: Sequence[Row], calibration: Sequence[Row]
) -> Iterator[Verdict]:
    """Judge calibration, step times and planning, each at its worst point.

    Args:
        rows: Of the policy, all cells. In drifting ones nothing but planning is judged:
            what a drift does to estimates shows in the recovery.
        calibration: Of the traced cells.
    """
    steady = [row for row in rows if not is_drifting(row["workload"])]
    yield from _judge_calibration(
        "calibration error in the measured rounds, worst point",
        steady,
        "calibration_error",
        "calibration_exact_error",
    )
    yield from _judge_calibration(
        "calibration error in traces, worst point", calibration, "error", "exact_error"
    )
    worst = _worst(steady, "step_time_error")
    if worst is not None:
        error = float(worst["step_time_error"])
        what = "median step-time error, worst point"
        yield _most(what, worst, error, MOST_STEP_TIME_ERROR)
    yield from _judge_planning(rows)


def _judge_calibration(
    what: str, rows: Iterable[Row], key: str, exact_key: str
) -> Iterator[Verdict]:
    """Judge every point; the worst is the one with the worst verdict.

    A point with few outcomes has a large error by chance. It decides nothing, and must
    not stand before one whose smaller error no chance explains.
    """
    verdicts = []
    for row in rows:
        if row.get(key) is None:
            continue
        error, by_chance = float(row[key]), float(row[exact_key])
        note = f"exact predictions: {by_chance:.3f} by chance"
        verdict = _most(what, row, error, MOST_CALIBRATION_ERROR, note)
        if error - by_chance <= MOST_CALIBRATION_ERROR < error:
            verdict = replace(verdict, verdict=NOT_DECIDED)
        verdicts.append(verdict)
    if verdicts:
        yield max(verdicts, key=_badness)


def _badness(verdict: Verdict) -> tuple[int, float]:
    assert verdict.value is not None
    return _BY_SEVERITY.index(verdict.verdict), verdict.value


def _judge_planning(rows: Iterable[Row]) -> Iterator[Verdict]:
    timed = [row for row in rows if row.get("planning_us_per_step") is not None]
    if not timed:
        return
    largest = max(row["concurrency"] for row in timed)
    own = [row for row in timed if row["concurrency"] == largest]
    worst = _worst(own, "planning_us_per_step")
    assert worst is not None
    is_whole = worst["planning_is_whole"]
    verdict = _most(
        "planning, microseconds a step",
        worst,
        float(worst["planning_us_per_step"]),
        MOST_PLANNING_US,
        "" if is_whole else "the selection alone",
    )
    is_enough = is_whole and largest >= PLANNING_AT_REQUESTS
    if not is_enough and verdict.verdict == MET:
        verdict = replace(verdict, verdict=NOT_DECIDED)
    yield verdict


def _most(what: str, row: Row, value: float, aim: float, note: str = "") -> Verdict:
    verdict = MET if value <= aim else MISSED
    where = cell_of(row).name
    return Verdict(5, what, where, aim, False, value, None, None, verdict, note)


def _worst(rows: Iterable[Row], key: str) -> Row | None:
    known = [row for row in rows if row.get(key) is not None]
    return max(known, key=lambda row: float(row[key]), default=None)
