"""Stated objectives, e.g. `ttft_p95_ms<=500`, and whether results meet them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .growth import Growth, find_leftovers, fit_all
from .rows import COMPARED, FIGURES

Row = Mapping[str, Any]

UNCOUNTED = "the server did not count tokens: events were counted, a lower bound"

_FORM = re.compile(
    r"(?:(?P<arm>[^@<>]+)@)?(?P<metric>[a-z]\w*)(?P<op><=|>=)(?P<value>\d*\.?\d+)"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound on a figure of an arm, of all arms where none is named.

    Of two arms the ratio is bound.
    """

    text: str
    arms: tuple[str, ...]
    metric: str
    at_most: bool
    value: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one arm meets an objective in one cell.

    A figure that is missing, or a time or rate from a run that the client spoilt, meets
    nothing; the note says why.
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
    arms = tuple(match["arm"].split("/", 1)) if match["arm"] else ()
    known = COMPARED if len(arms) == 2 else FIGURES
    if match["metric"] not in known:
        raise ValueError(
            f"{text!r}: there is no {'ratio' if len(arms) == 2 else 'figure'} "
            f"{match['metric']}; use one of {', '.join(known)}"
        )
    return Objective(
        text, arms, match["metric"], match["op"] == "<=", float(match["value"])
    )


def judge(
    objectives: Sequence[Objective], rows: Sequence[Row], ratios: Sequence[Row]
) -> list[Verdict]:
    """Judge every objective in every cell of the results' rows and paired ratios."""
    verdicts = []
    for objective in objectives:
        found = [_judge(objective, *one) for one in _find(objective, rows, ratios)]
        # A slip in an arm's name must not pass as success.
        verdicts += found or [
            Verdict(objective.text, "anywhere", None, False, "there is no such arm")
        ]
    return verdicts


def _find(
    objective: Objective, rows: Sequence[Row], ratios: Sequence[Row]
) -> Iterator[tuple[str, float | None, list[Row]]]:
    """Yield places, what is found there, and the rows that it comes from."""
    arms, metric = objective.arms, objective.metric
    own = [row for row in rows if not arms or row["arm"] in arms]
    if len(arms) < 2:
        for row in own:
            value = row[metric]
            is_spread = isinstance(value, Mapping)
            yield where(row), value["median"] if is_spread else value, [row]
        return
    for cell in dict.fromkeys((row["workload"], row["load"]) for row in own):
        both = [row for row in own if (row["workload"], row["load"]) == cell]
        by_arms: dict[tuple[str, ...], float] = {}
        for one in ratios:
            if (one["workload"], one["load"], one["metric"]) == (*cell, metric):
                by_arms[one["arm"], one["against"]] = one["ratio"]
                by_arms[one["against"], one["arm"]] = 1 / one["ratio"]
        if len(both) == 2:
            yield f"{'/'.join(arms)}, {', '.join(cell)}", by_arms.get(arms), both


def _judge(
    objective: Objective, place: str, found: float | None, rows: Iterable[Row]
) -> Verdict:
    metric, note = objective.metric, ""
    has_time = metric.endswith(("_ms", "_per_s")) or metric.startswith("goodput")
    has_tokens = "token" in metric or metric.startswith(("tpot", "goodput"))
    if has_time and not all(row["is_valid"] for row in rows):
        note = "the client was the limit"
    elif has_tokens and not all(row["tokens_counted_by_server"] for row in rows):
        note = UNCOUNTED
    if found is None:
        return Verdict(objective.text, place, None, False, note or "not measured")
    within = found <= objective.value if objective.at_most else found >= objective.value
    return Verdict(objective.text, place, found, within and not note, note)


def where(row: Row) -> str:
    """Name the arm and the cell of a row."""
    return f"{row['arm']}, {row['workload']}, {row['load']}"


def judge_chaos(runs: Iterable[Row]) -> list[Verdict]:
    """Return a verdict for everything that was to befall servers and streams."""
    return [
        Verdict(
            f"chaos: {blow['kind']} is done",
            where(run),
            blow.get("num_streams"),
            blow["done"],
            blow["what"],
        )
        for run in runs
        for blow in run["chaos"]
    ]


def judge_soak(runs: Iterable[Row]) -> list[Verdict]:
    """Return a verdict for each measure of each process of soak runs, and leaks."""
    verdicts = []
    for run in runs:
        if not run.get("is_soak"):
            continue
        place, fits = where(run), fit_all(run["process_samples"])
        if not fits:
            note = "no processes were sampled"
            verdicts.append(Verdict("soak", place, None, False, note))
        verdicts += [
            _judge_growth(f"{role}: {measure} does not grow", place, fit)
            for (role, measure), fit in fits.items()
        ]
        left = find_leftovers(run["timeline"])
        verdicts.append(
            Verdict("nothing is left", place, None, not left, "; ".join(left))
        )
    return verdicts


def _judge_growth(text: str, place: str, fit: Growth | None) -> Verdict:
    if fit is None:
        note = "too few samples of the same processes; soak longer"
        return Verdict(text, place, None, False, note)
    note = (
        f"{fit.per_hour:+.1f} an hour ({fit.per_hour_low:+.1f} to "
        f"{fit.per_hour_high:+.1f}; {fit.tolerated_per_hour:.1f} are tolerated) "
        f"over {60 * fit.hours:.0f} min, mean {fit.mean:.0f}"
    )
    if not (fit.is_certain or fit.is_excluded):
        note = f"cannot tell, soak longer: {note}"
    return Verdict(text, place, fit.per_hour, fit.is_excluded, note)
