"""Stated objectives, e.g. `ttft_p95_ms<=500`, and whether results meet them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .results import COMPARED, FIGURES

Row = Mapping[str, Any]

UNCOUNTED = "the server did not count tokens: events were counted, a lower bound"

_FORM = re.compile(
    r"(?:(?P<arm>[^@<>]+)@)?(?P<metric>[a-z]\w*)(?P<op><=|>=)(?P<value>\d*\.?\d+)"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound on a figure.

    Attributes:
        text: As it was given.
        arm: Whom it binds; None for every arm. `A/B` binds the ratio of A to B.
        metric: Name of the figure, as in `results.json`.
        at_most: Whether the value is an upper bound.
        value: The bound.
    """

    text: str
    arm: str | None
    metric: str
    at_most: bool
    value: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one arm meets an objective in one cell.

    Attributes:
        objective: As it was given.
        where: Arm and cell.
        found: The figure; None if there is none.
        is_met: Whether it is met. A figure that is missing, or a time or rate from a
            run that the client spoilt, meets nothing.
        note: Why it counts as missed although the number looks right.
    """

    objective: str
    where: str
    found: float | None
    is_met: bool
    note: str = ""


def parse_objective(text: str) -> Objective:
    """Read `METRIC<=VALUE`, `METRIC>=VALUE`, `ARM@METRIC...` or `A/B@METRIC...`.

    Raises:
        ValueError: If it is none of these, or what it binds is no figure.
    """
    match = _FORM.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(
            f"{text!r} is no objective; write e.g. ttft_p95_ms<=500, "
            "goodput@goodput_per_s>=2 or ours/vllm@output_tokens_per_s>=0.95"
        )
    is_ratio = "/" in (match["arm"] or "")
    known = COMPARED if is_ratio else FIGURES
    if match["metric"] not in known:
        raise ValueError(
            f"{text!r}: there is no {'ratio' if is_ratio else 'figure'} "
            f"{match['metric']}; use one of {', '.join(known)}"
        )
    return Objective(
        text, match["arm"], match["metric"], match["op"] == "<=", float(match["value"])
    )


def judge(
    objectives: Sequence[Objective], rows: Sequence[Row], ratios: Sequence[Row]
) -> list[Verdict]:
    """Judge every objective in every cell.

    Args:
        objectives: What was stated.
        rows: Of results: a row for each arm and cell, figures as spreads.
        ratios: Of results: paired ratios of two arms.
    """
    verdicts = []
    for objective in objectives:
        found = (
            _judge_ratios(objective, rows, ratios)
            if objective.arm and "/" in objective.arm
            else _judge_rows(objective, rows)
        )
        # A slip in an arm's name must not pass as success.
        verdicts += found or [
            Verdict(objective.text, "anywhere", None, False, "there is no such arm")
        ]
    return verdicts


def _judge_rows(objective: Objective, rows: Sequence[Row]) -> list[Verdict]:
    verdicts = []
    for row in rows:
        if objective.arm not in (None, row["arm"]):
            continue
        value = row[objective.metric]
        found = value["median"] if isinstance(value, Mapping) else value
        spoilt = _spoilt(objective.metric, row)
        verdicts.append(_verdict(objective, where(row), found, spoilt))
    return verdicts


def _judge_ratios(
    objective: Objective, rows: Sequence[Row], ratios: Sequence[Row]
) -> list[Verdict]:
    ours, _, theirs = (objective.arm or "").partition("/")
    by_cell: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_cell.setdefault((row["workload"], row["load"]), {})[row["arm"]] = row
    verdicts = []
    for cell, by_arm in by_cell.items():
        if not {ours, theirs} <= by_arm.keys():
            continue
        found = None
        for ratio in ratios:
            if (ratio["workload"], ratio["load"], ratio["metric"]) == (
                *cell,
                objective.metric,
            ):
                if (ratio["arm"], ratio["against"]) == (ours, theirs):
                    found = ratio["ratio"]
                elif (ratio["arm"], ratio["against"]) == (theirs, ours):
                    found = 1 / ratio["ratio"]
        spoilt = _spoilt(objective.metric, by_arm[ours], by_arm[theirs])
        place = f"{objective.arm}, {cell[0]}, {cell[1]}"
        verdicts.append(_verdict(objective, place, found, spoilt))
    return verdicts


def _spoilt(metric: str, *rows: Row) -> str:
    """Say why a figure cannot be trusted: the client was late, or counted tokens."""
    has_time = metric.endswith(("_ms", "_per_s")) or metric.startswith("goodput")
    if has_time and not all(row["is_valid"] for row in rows):
        return "the client was the limit"
    has_tokens = "token" in metric or metric.startswith(("tpot", "goodput"))
    if has_tokens and not all(row["tokens_counted_by_server"] for row in rows):
        return UNCOUNTED
    return ""


def _verdict(
    objective: Objective, place: str, found: float | None, spoilt: str
) -> Verdict:
    if found is None:
        return Verdict(objective.text, place, None, False, spoilt or "not measured")
    within = found <= objective.value if objective.at_most else found >= objective.value
    return Verdict(objective.text, place, found, within and not spoilt, spoilt)


def where(row: Row) -> str:
    """Name the arm and the cell of a row."""
    return f"{row['arm']}, {row['workload']}, {row['load']}"
