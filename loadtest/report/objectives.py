"""Stated objectives, e.g. `ttft_p95_ms<=500`, and whether results meet them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from .growth import Growth, find_leftovers, fit_all
from .rows import COMPARED, FIGURES

Row = Mapping[str, Any]

_CREDENTIALS = ("is_valid", "tokens_counted_by_server")
_UNCOUNTED = "the server did not count tokens: events were counted, a lower bound"

_FORM = re.compile(
    r"(?:(?P<arm>[^@<>]+)@)?(?P<metric>[a-z]\w*)(?P<op><=|>=)(?P<value>\d*\.?\d+)"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound on a figure of an arm, of all arms where none is named.

    Of two arms, `ours/theirs`, the ratio is bound.
    """

    text: str
    arm: str | None
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
    arm, metric, comparison, value = match.groups()
    kind, known = ("ratio", COMPARED) if "/" in (arm or "") else ("figure", FIGURES)
    if metric not in known:
        raise ValueError(
            f"{text!r}: there is no {kind} {metric}; use one of {', '.join(known)}"
        )
    return Objective(text, arm, metric, comparison == "<=", float(value))


def judge(
    objectives: Sequence[Objective], rows: Sequence[Row], ratios: Sequence[Row]
) -> list[Verdict]:
    """Judge every objective in every cell of the results' rows and paired ratios."""
    pairs, verdicts = pair_arms(rows, ratios), []
    for objective in objectives:
        arm, candidates = objective.arm, pairs if "/" in (objective.arm or "") else rows
        own = [row for row in candidates if arm in (None, row["arm"])]
        verdicts += [_judge(objective, row) for row in own]
        if not own:
            # A slip in an arm's name must not pass as success.
            note = "there is no such arm"
            verdicts.append(Verdict(objective.text, "anywhere", None, False, note))
    return verdicts


def pair_arms(rows: Sequence[Row], ratios: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each two arms of a cell, whose figures are ratios."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in ratios:
        place = one["workload"], one["load"], one["metric"]
        spread = {"median": one["ratio"], "min": one["low"], "max": one["high"]}
        known[*place, one["arm"], one["against"]] = spread
        known[*place, one["against"], one["arm"]] = {"median": 1 / one["ratio"]}
    pairs = []
    for a, b in permutations(rows, 2):
        cell = a["workload"], a["load"]
        if cell == (b["workload"], b["load"]):
            names = a["arm"], b["arm"]
            pair = {"arm": "/".join(names), "workload": cell[0], "load": cell[1]}
            pair |= {name: a[name] and b[name] for name in _CREDENTIALS}
            pair |= {m: known.get((*cell, m, *names)) for m in COMPARED}
            pairs.append(pair)
    return pairs


def _judge(objective: Objective, row: Row) -> Verdict:
    metric, note, found = objective.metric, "", row[objective.metric]
    if isinstance(found, Mapping):
        found = found["median"]
    has_time = "_ms" in metric or metric.endswith("_per_s")
    has_time |= metric.startswith("goodput")
    has_tokens = "token" in metric or metric.startswith(("tpot", "goodput"))
    if has_time and not row["is_valid"]:
        note = "the client was the limit"
    elif has_tokens and not row["tokens_counted_by_server"]:
        note = _UNCOUNTED
    elif found is None:
        note = "not measured"
    is_met = not note and (
        found <= objective.value if objective.at_most else found >= objective.value
    )
    return Verdict(objective.text, where(row), found, is_met, note)


def where(row: Row) -> str:
    """Name the arm and the cell of a row."""
    return f"{row['arm']}, {row['workload']}, {row['load']}"


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
        left = "; ".join(find_leftovers(run["timeline"]))
        verdicts.append(Verdict("nothing is left", place, None, not left, left))
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
