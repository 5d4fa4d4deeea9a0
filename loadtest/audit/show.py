"""From measured cells to a table."""

from collections.abc import Iterator, Sequence
from typing import Any

from loadtest.intervals import compare

from .cells import PLAIN
from .engine import AUDITED, HELD, POLICY

_HEAD = (
    "| cell | policy | audit says | offline, same engine | audit / offline "
    "| engine without drafter / held | audited / held | audited | over best fixed |"
)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table; intervals are of 95 %."""
    return "\n".join([_HEAD, "|---" * 9 + "|", *map(_line, rows), ""])


def _line(row: dict[str, Any]) -> str:
    return f"| {' | '.join(_cells(row))} |"


def _cells(row: dict[str, Any]) -> Iterator[str]:
    speeds, report = row["tokens_per_s"], row["report"]
    means = {way: _by_round(own, row) for way, own in speeds.items()}
    offline = compare(means[POLICY] or means[AUDITED], means[HELD])
    says = report.get("speculation_gain_none")
    yield row["cell"]
    yield f"{row['policy']}, {row['draft']}"
    yield _gain(report, "none")
    yield _ratio(offline)
    yield "-" if says is None else f"{says / offline['ratio']:.3f}"
    yield _ratio(compare(means[PLAIN], means[HELD])) if means[PLAIN] else "-"
    yield _ratio(compare(means[AUDITED], means[HELD])) if means[AUDITED] else "-"
    share, cost = report["audited_step_share"], report["audit_cost_share"]
    yield f"{share:.1%} of steps, cost {cost:.2%} of time"
    yield _gain(report, "best_fixed")


def _by_round(speeds: list[float], row: dict[str, Any]) -> list[float]:
    """Return a mean for each round, in which a way may have come several times."""
    each = len(speeds) // row["rounds"]
    rounds = range(row["rounds"])
    return (
        [sum(speeds[each * n : each * (n + 1)]) / each for n in rounds] if each else []
    )


def _gain(report: dict[str, float], arm: str) -> str:
    name = f"speculation_gain_{arm}"
    if name not in report:
        return f"cannot tell: {report.get(f'num_audited_{arm}', 0):.0f} blocks"
    lower, upper = report[f"{name}_lower"], report[f"{name}_upper"]
    return f"{report[name]:.3f} [{lower:.3f}, {upper:.3f}]"


def _ratio(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['ratio']:.3f}"
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
