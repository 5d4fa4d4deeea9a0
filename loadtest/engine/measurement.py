"""From a loop's record, and what was counted beside it, to figures."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
import psutil

from .loop import LoopRecord

_COUNTED = (
    *("num_steps", "num_verified_tokens", "num_accepted_tokens"),
    *("planning_seconds_total", "num_fallbacks"),
)


def list_deliveries(record: LoopRecord) -> pd.DataFrame:
    """Return a row for each step and request: `end_s`, `request`, its new tokens."""
    return pd.DataFrame(
        [
            (step_s, one.index, list(one.token_ids), len(one.token_ids))
            for step_s, deliveries in record.steps
            for one in deliveries
            if one.token_ids
        ],
        columns=["end_s", "request", "token_ids", "tokens"],
    )


def measure(record: LoopRecord) -> dict[str, Any]:
    """Compute what the requests saw in the steady part.

    Returns:
        Plain values. `acceptance_length` is tokens per target pass of a decoding
        request, the bonus token included: 1 without speculation. Inter-token latency
        is the time between two deliveries to a request; one delivery may carry
        several tokens. `time_per_token_p50_ms` is the median over requests of their
        decoding time per token. `phases` are tokens per second before and after
        conditions changed. `digests` are of the replies of all requests.
    """
    start_s, end_s = record.marks["start"], record.marks["end"]
    frame = list_deliveries(record)
    replies = frame.groupby("request")["token_ids"].sum()
    frame["gap_ms"] = 1e3 * frame.groupby("request")["end_s"].diff()
    steady = frame[frame["end_s"].between(start_s, end_s, inclusive="right")]
    # The prompt's own pass yields the first token, which follows none.
    decode = steady.dropna()
    spent = decode.groupby("request")[["gap_ms", "tokens"]].sum()
    switch_s, phases = record.marks.get("switch", end_s), None
    if start_s < switch_s < end_s:
        is_before = steady["end_s"] <= switch_s
        phases = {
            "before": float(steady["tokens"][is_before].sum() / (switch_s - start_s)),
            "after": float(steady["tokens"][~is_before].sum() / (end_s - switch_s)),
        }
    return {
        "window_s": end_s - start_s,
        "num_steps": sum(start_s < step_s <= end_s for step_s, _ in record.steps),
        "num_tokens": int(steady["tokens"].sum()),
        "acceptance_length": decode["tokens"].mean(),
        "itl_p50_ms": decode["gap_ms"].quantile(0.5),
        "itl_p99_ms": decode["gap_ms"].quantile(0.99),
        "time_per_token_p50_ms": (spent["gap_ms"] / spent["tokens"]).median(),
        "phases": phases,
        "num_requests": len(replies),
        "num_output_tokens": int(frame["tokens"].sum()),
        "digests": digest_replies(replies),
    }


def list_latencies(answers: Mapping[str, Any]) -> pd.DataFrame:
    """Return `tokens` and latencies of each request; they count from when it was due.

    `ttft_ms` is the time to the first token, `e2e_ms` to the last one. `tpot_ms` is
    that between first and last token over the tokens after the first; NaN for one.
    """
    due_s = answers.get("due_s", 0.0)
    first_s, last_s, tokens = (
        pd.Series(answers[name]) for name in ("first_s", "last_s", "num_tokens")
    )
    return pd.DataFrame(
        {
            "ttft_ms": 1e3 * (first_s - due_s),
            "tpot_ms": 1e3 * (last_s - first_s) / (tokens - 1).where(tokens > 1),
            "e2e_ms": 1e3 * (last_s - due_s),
            "tokens": tokens,
        }
    )


def digest_replies(replies: Iterable[list[int]]) -> list[str]:
    """Return a short digest of each reply's tokens."""
    return [
        hashlib.blake2b(repr(reply).encode(), digest_size=6).hexdigest()
        for reply in replies
    ]


class Counters:
    """What the scheduler counted, and who used the machine, between two marks."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any] | None]) -> None:
        """Count nothing yet; a snapshot is the scheduler's figures, if it has any."""
        self._snapshot, self._process = snapshot, psutil.Process()
        self._marks: list[Mapping[str, Any] | None] = []
        self._others = 0.0

    def mark(self) -> None:
        """Read all figures: at the start, and at the end."""
        self._marks.append(self._snapshot())
        # Both in percent since the mark before; the latter of one core.
        own = self._process.cpu_percent() / (psutil.cpu_count() or 1)
        self._others = max(0.0, psutil.cpu_percent() - own) / 100

    def result(self) -> dict[str, Any]:
        """Return what happened between the marks; None where nobody counted.

        `other_cpu_share` is the share of the machine's cores that other processes, and
        its host, used. The planner's errors are those of its last steps.
        """
        first, last = self._marks
        planner = (last or {}).get("planner", {})
        counters = None
        if first and last:
            grown = subtract(last, first)
            counters = {name: grown[name] for name in _COUNTED if name in grown}
            reasons = counters["num_fallbacks"].items()
            counters["num_fallbacks"] = {why: count for why, count in reasons if count}
        return {
            "counters": counters,
            "other_cpu_share": self._others,
            "step_time_error": planner.get("step_time_error"),
            "calibration_error": planner.get("calibration_error"),
        }


def subtract(last: Any, first: Any) -> Any:
    """Subtract numbers, in lists and mappings too; leave out everything else."""
    if isinstance(last, Mapping):
        grown = {k: subtract(v, (first or {}).get(k)) for k, v in last.items()}
        return {name: value for name, value in grown.items() if value is not None}
    if isinstance(last, list):
        before = first or [0] * len(last)
        return [subtract(a, b) for a, b in zip(last, before, strict=True)]
    is_number = isinstance(last, int | float) and not isinstance(last, bool)
    return last - (first or 0) if is_number else None
