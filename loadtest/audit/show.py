"""From measured cells to a table."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from loadtest.intervals import compare, show_ratio
from loadtest.page import to_table

from .cells import PLAIN
from .engine import AUDITED, HELD, POLICY

_HEAD = (
    *("cell", "policy", "audit says", "offline, same engine", "audit / offline"),
    *("engine without drafter / held", "audited / held", "audited", "over best fixed"),
)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table; intervals are of 95 %."""
    return to_table([_HEAD, *map(_cells, rows)]) + "\n"


def _cells(row: dict[str, Any]) -> Iterator[str]:
    speeds, report = row["tokens_per_s"], row["report"]
    means = {way: _by_round(own, row) for way, own in speeds.items()}
    offline = compare(means[POLICY] or means[AUDITED], means[HELD])
    says = report.get("speculation_gain_none")
    yield row["cell"]
    yield f"{row['policy']}, {row['draft']}"
    yield _gain(report, "none")
    yield show_ratio(offline, 3)
    yield "-" if says is None else f"{says / offline['ratio']:.3f}"
    for way in (PLAIN, AUDITED):
        found = compare(means[way], means[HELD]) if means[way] else None
        yield show_ratio(found, 3) or "-"
    share, cost = report["audited_step_share"], report["audit_cost_share"]
    yield f"{share:.1%} of steps, cost {cost:.2%} of time"
    yield _gain(report, "best_fixed")


def _by_round(speeds: list[float], row: dict[str, Any]) -> list[float]:
    """Return a mean for each round, in which a way may have come several times."""
    if not speeds:
        return []
    means: list[float] = np.reshape(speeds, (row["rounds"], -1)).mean(axis=1).tolist()
    return means


def _gain(report: dict[str, float], arm: str) -> str:
    name = f"speculation_gain_{arm}"
    if name not in report:
        return f"cannot tell: {report.get(f'num_audited_{arm}', 0):.0f} blocks"
    ends = {"low": report[f"{name}_lower"], "high": report[f"{name}_upper"]}
    return show_ratio({"ratio": report[name]} | ends, 3)
