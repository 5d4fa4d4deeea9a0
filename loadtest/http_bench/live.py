"""Figures of a run while it goes on, for Locust's web page and the terminal."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .outcome import Outcome

_WINDOW_S = 30.0
_MAX_KEPT = 5_000
_MAX_POINTS = 1800


@dataclass
class LiveFigures:
    """Totals since the begin, and figures of the latest half minute.

    Attributes:
        ttft_target_ms: For goodput.
        tpot_target_ms: For goodput.
        last_end_s: When the last of the finished requests ended.
        history: The row of all workloads over time; each with `at_s`.
    """

    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    num_finished: int = 0
    num_good: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_end_s: float = 0.0
    history: deque[dict[str, Any]] = field(
        default_factory=lambda: deque(maxlen=_MAX_POINTS)
    )
    _recent: deque[Outcome] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))
    _forgotten_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count a finished request."""
        self.num_finished += 1
        self.num_good += outcome.meets(self.ttft_target_ms, self.tpot_target_ms)
        if outcome.failure is not None:
            self.failures[outcome.failure] += 1
        self.last_end_s = max(self.last_end_s, outcome.end_s)
        if len(self._recent) == _MAX_KEPT:
            # Workers report in turn: the first that came need not be the first to end.
            self._forgotten_s = max(self._forgotten_s, self._recent[0].end_s)
        self._recent.append(outcome)

    def record(self, now_s: float) -> None:
        """Add a point to the history, unless time stands still.

        Args:
            now_s: Since the run began.
        """
        at_s = round(now_s, 1)
        if at_s > (self.history[-1]["at_s"] if self.history else 0.0):
            self.history.append({"at_s": at_s, **self.rows(now_s)[-1]})

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return a row for each workload, and one for all.

        Where requests come faster than can be kept, over the time of those that are.

        Args:
            now_s: Since the run began.
        """
        now_s = max(now_s, self.last_end_s)
        begin_s = max(0.0, now_s - _WINDOW_S, self._forgotten_s)
        recent = [o for o in self._recent if o.end_s > begin_s]
        width_s = max(1e-9, now_s - begin_s)
        names = sorted({o.workload for o in recent})
        rows = [
            self._row(n, [o for o in recent if o.workload == n], width_s) for n in names
        ]
        return [*rows, self._row("all", recent, width_s)]

    def _row(
        self, name: str, outcomes: Sequence[Outcome], width_s: float
    ) -> dict[str, Any]:
        good = [o.meets(self.ttft_target_ms, self.tpot_target_ms) for o in outcomes]
        gaps = [gap for o in outcomes for gap in o.gaps_ms]
        return {
            "name": name,
            "requests_per_s": round(len(outcomes) / width_s, 2),
            "goodput_per_s": round(sum(good) / width_s, 2),
            "tokens_in_per_s": _rate([o.prompt_tokens or 0 for o in outcomes], width_s),
            "tokens_out_per_s": _rate([o.output_tokens for o in outcomes], width_s),
            "ttft_p50_ms": _percentile([o.ttft_ms for o in outcomes], 50),
            "ttft_p95_ms": _percentile([o.ttft_ms for o in outcomes], 95),
            "itl_p50_ms": _percentile(gaps, 50),
            "itl_p95_ms": _percentile(gaps, 95),
            "tpot_p50_ms": _percentile([o.tpot_ms for o in outcomes], 50),
            "e2e_p50_ms": _percentile([o.e2e_ms for o in outcomes], 50),
            "e2e_p95_ms": _percentile([o.e2e_ms for o in outcomes], 95),
            "failed": sum(o.is_failed for o in outcomes),
            "cut": sum(o.is_cut for o in outcomes),
        }


COLUMNS = (
    ("name", "Workload"),
    ("requests_per_s", "Requests/s"),
    ("goodput_per_s", "Goodput/s"),
    ("tokens_in_per_s", "Tokens in/s"),
    ("tokens_out_per_s", "Tokens out/s"),
    ("ttft_p50_ms", "TTFT p50 ms"),
    ("ttft_p95_ms", "TTFT p95 ms"),
    ("itl_p50_ms", "ITL p50 ms"),
    ("itl_p95_ms", "ITL p95 ms"),
    ("tpot_p50_ms", "TPOT p50 ms"),
    ("e2e_p50_ms", "E2E p50 ms"),
    ("e2e_p95_ms", "E2E p95 ms"),
    ("failed", "Failed"),
    ("cut", "Cut streams"),
)
"""Keys and titles of a row, in the order in which they are shown."""


def _rate(counts: Sequence[int], width_s: float) -> float:
    return round(sum(counts) / width_s, 1)


def _percentile(values: Sequence[float | None], percent: int) -> float | None:
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    if percent == 50:
        return round(statistics.median(known), 1)
    return round(known[min(len(known) - 1, int(percent / 100 * len(known)))], 1)
