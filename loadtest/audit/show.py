"""From measured rounds to two tables: is the audit right, and is it never worse?"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from loadtest.intervals import compare, show_ratio
from loadtest.page import to_table

from .cells import PLAIN
from .engine import AUDITED, HELD, POLICY

AGREES, NEVER_WORSE = 0.02, 0.99
"""How far what an audit says may be from what is measured, and the least of depth 0's
tokens per second."""

_RIGHT = (
    *("cell", "policy", "rounds, starts", "audit says", "offline, same engine"),
    *("audit - offline", "within .02", "over best fixed", "audited"),
)
_WORSE = (
    *("cell", "policy", "audited / held", "at least .99", "steps tried, held"),
    *("trials ended", "engine without drafter / held"),
)
_NOTES = f"""Intervals are of 95 %. Steps and tokens are of the steady part of each run.

- The first table asks whether the audit is right: offline are the policy and depth 0 in
  turn, in its engine. The difference has both intervals, as of independent errors. It
  is within {AGREES} only if all of its interval is, beyond only if none is; else it is
  not told. The gain over the best fixed length has nothing here to be held against.
- The second asks whether it is never worse than depth 0: by the lower end of the
  interval, and only if a trial of this load ended in these rounds, or nothing was held
  back. Rounds with a trial and without are not alike: few of them tell little.
- The engine without a drafter is another process, and one start differs from the next
  by some 2 %: its interval is over starts, and there is none of one start.
"""

Rows = Sequence[dict[str, Any]]


def render(rows: Rows) -> str:
    """Return both tables as Markdown; a row is a round of a cell, as it was kept."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["cell"], f"{row['policy']}, {row['draft']}"].append(row)
    tables = (
        to_table([head, *([*name, *tell(own)] for name, own in cells.items())])
        for head, tell in ((_RIGHT, _tell_gain), (_WORSE, _tell_worst))
    )
    return "\n\n".join((*tables, _NOTES))


def _tell_gain(rows: Rows) -> Iterator[str]:
    reports = [own[-1]["report"] for own in _by_start(rows)]
    offline = compare(_means(rows, POLICY) or _means(rows, AUDITED), _means(rows, HELD))
    says, last = _combine(reports, "none"), reports[-1]
    yield f"{offline['rounds']}, {len(reports)}"
    yield _gain(reports, "none")
    yield show_ratio(offline, 3)
    if says is None or offline["low"] is None:
        yield from ("-", "-")
    else:
        halves = [0.5 * (one["high"] - one["low"]) for one in (says, offline)]
        gap, half = says["ratio"] - offline["ratio"], math.hypot(*halves)
        yield f"{gap:+.3f} ({gap - half:+.3f} to {gap + half:+.3f})"
        yield _judge(gap - half, gap + half, -AGREES, AGREES)
    yield _gain(reports, "best_fixed")
    share, cost = last["audited_step_share"], last["audit_cost_share"]
    yield f"{share:.1%} of steps, cost {cost:.2%} of time"


def _tell_worst(rows: Rows) -> Iterator[str]:
    found = compare(_means(rows, AUDITED), _means(rows, HELD))
    counts = sum((Counter(row.get("counts", {})) for row in rows), Counter[str]())
    yield show_ratio(found, 3)
    verdict = "not told"
    if counts["steps"] and found["low"] is not None:
        verdict = _judge(found["low"], found["high"], NEVER_WORSE, math.inf)
    is_tried = counts["trials"] or not counts["held"]
    yield verdict if is_tried or verdict != "yes" else "only while held"
    shares = [counts[name] / max(1, counts["steps"]) for name in ("tried", "held")]
    yield ", ".join(f"{share:.1%}" for share in shares) if counts else "-"
    when = [str(row["round"]) for row in rows if row.get("counts", {}).get("trials")]
    at = f" (rounds {', '.join(when)})" if when else ""
    yield f"{counts['trials']}{at}" if counts else "-"
    ratios = [
        compare(plain, _means(own, HELD))["ratio"]
        for own in _by_start(rows)
        if (plain := _means(own, PLAIN))
    ]
    yield show_ratio(compare(ratios, [1.0] * len(ratios)), 3) if ratios else "-"


def _judge(low: float, high: float, least: float, most: float) -> str:
    """Say whether a value is between two others, of which its interval is known."""
    if least <= low and high <= most:
        return "yes"
    return "no" if high < least or most < low else "not told"


def _by_start(rows: Rows) -> list[list[dict[str, Any]]]:
    """Return the rounds of each engine's start, in order."""
    starts: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        starts[row.get("engine_start")].append(row)
    return list(starts.values())


def _means(rows: Rows, way: str) -> list[float]:
    """Return a mean for each round, in which a way comes twice or more often.

    Older rows hold all rounds of a cell.
    """
    means: list[float] = []
    for row in rows:
        if speeds := row["tokens_per_s"].get(way):
            by_round = np.reshape(speeds, (row.get("rounds", 1), -1))
            means += by_round.mean(axis=1).tolist()
    return means


def _combine(reports: Rows, arm: str) -> dict[str, float] | None:
    """Return what audits of several starts say together; None if none can tell."""
    name = f"speculation_gain_{arm}"
    told = [one for one in reports if name in one]
    if not told:
        return None
    halves = [0.5 * (one[f"{name}_upper"] - one[f"{name}_lower"]) for one in told]
    weights = np.array(halves) ** -2.0
    ratio = float(np.average([one[name] for one in told], weights=weights))
    half = float(weights.sum() ** -0.5)
    return {"ratio": ratio, "low": ratio - half, "high": ratio + half}


def _gain(reports: Rows, arm: str) -> str:
    found = _combine(reports, arm)
    if found is not None:
        return show_ratio(found, 3)
    num_blocks = sum(one.get(f"num_audited_{arm}", 0) for one in reports)
    return f"cannot tell: {num_blocks:.0f} blocks"
