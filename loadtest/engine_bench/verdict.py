"""One line of what the benchmark is meant to show.

It is *met* or *missed* when its 95 % interval leaves no doubt, and *not decided*
otherwise: more rounds decide it.
"""

from __future__ import annotations

from dataclasses import dataclass

MET, MISSED, NOT_DECIDED = "met", "missed", "not decided"
NO_HEADROOM = "no headroom"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line.

    Attributes:
        measure: Number of the aim: 1 to 5 are about `goodput`, 6 about cold depth 0.
        what: What is measured.
        where: At which point, or over which.
        aim: What it should be.
        is_least: Whether the aim is the least that will do, or the most.
        value: What was measured; None where nothing was.
        low: Lower end of the 95 % interval; None without one.
        high: Upper end.
        verdict: `met`, `missed`, `not decided` or `no headroom`.
        note: What else belongs to it.
    """

    measure: int
    what: str
    where: str
    aim: float
    is_least: bool
    value: float | None
    low: float | None
    high: float | None
    verdict: str
    note: str = ""


def judge_interval(aim: float, low: float | None, high: float | None) -> str:
    """Judge something that should be at least the aim."""
    if low is None or high is None:
        return NOT_DECIDED
    if low >= aim:
        return MET
    return MISSED if high < aim else NOT_DECIDED
