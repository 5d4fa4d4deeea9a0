"""From runs to results: a row for each arm and cell, paired ratios, tables."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from loadtest.engine_bench.comparison import compare, spread

Run = Mapping[str, Any]

_MAX_TIMES = 400

COMPARED = (
    "output_tokens_per_s",
    "goodput_per_s",
    "requests_per_s",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "e2e_p50_ms",
)
_SPREAD = (
    *("output_tokens_per_s", "input_tokens_per_s", "requests_per_s"),
    *("goodput_per_s", "goodput_share", "mean_in_flight"),
    *(f"{m}_p{p}_ms" for m in ("ttft", "itl", "tpot", "e2e") for p in (50, 95, 99)),
    *("cached_share", "client_cpu", "client_lag_ms", "send_lag_p99_ms", "machine_cpu"),
)
_SERVER_COUNTS = (
    "draft_tokens_proposed",
    "draft_tokens_verified",
    "draft_tokens_accepted",
    "fallbacks",
    "preemptions",
)
_COUNTS = (
    *("num_requests", "num_ok", "num_sent"),
    *("num_failed", "num_cut", "num_unfinished"),
)
FIGURES = (
    *(*_SPREAD, *_COUNTS, *_SERVER_COUNTS),
    *("failure_rate", "acceptance_length", "verification_success_rate"),
    "replicas_max",
)
"""The numbers of a row, single ones and spreads."""


def cell_of(run: Run) -> tuple[str, str]:
    """Return workload and load."""
    return run["workload"], run["load"]


def make_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise rounds: medians with range for figures, sums for counts.

    Runs that the client spoilt stay in, and mark their row.
    """
    rows = []
    for cell in dict.fromkeys(map(cell_of, runs)):
        for arm in dict.fromkeys(run["arm"] for run in runs):
            own = [r for r in runs if cell_of(r) == cell and r["arm"] == arm]
            if own:
                rows.append(_make_row(arm, cell, own))
    return rows


def make_ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare every arm with every earlier one, paired by round.

    Where a round of either has no figure, or nothing got through, there is no ratio:
    one of the other rounds alone would hide it.
    """
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    ratios = []
    for cell in dict.fromkeys(map(cell_of, runs)):
        for metric in COMPARED:
            by_arm = {
                arm: {
                    run["round"]: run[metric]
                    for run in runs
                    if cell_of(run) == cell and run["arm"] == arm
                }
                for arm in arms
            }
            whole = {arm for arm, values in by_arm.items() if all(values.values())}
            for number, ours in enumerate(arms):
                for theirs in arms[:number]:
                    if not {ours, theirs} <= whole:
                        continue
                    ratio = compare(by_arm[ours], by_arm[theirs])
                    if ratio is not None:
                        ratios.append(
                            {"arm": ours, "against": theirs, "metric": metric}
                            | {"workload": cell[0], "load": cell[1]}
                            | asdict(ratio)
                        )
    return ratios


def over_time(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return what was sampled during a run as rows of a table.

    Args:
        run: The run.
        kind: `timeline` or `process_samples`.

    Returns:
        Rows with the run's place, `at_s` in it and what was sampled, thinned to
        `_MAX_TIMES` times and the last one.
    """
    times = sorted({point["epoch_s"] for point in run[kind]})
    step = max(1, math.ceil(len(times) / _MAX_TIMES))
    kept = {*times[::step], *times[-1:]}
    place = {name: run[name] for name in ("round", "arm", "workload", "load")}
    rows = []
    for point in run[kind]:
        if point["epoch_s"] in kept:
            values = {name: point[name] for name in point if name != "epoch_s"}
            if "pids" in values:
                values["pids"] = " ".join(map(str, values["pids"]))
            rows.append(place | {"at_s": point["epoch_s"] - run["epoch_s"]} | values)
    return rows


def to_csv(rows: Sequence[Run]) -> str:
    """Return one line for each row, nested values flattened."""
    flat = [_flatten(row) for row in rows]
    columns = list(dict.fromkeys(name for one in flat for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _make_row(arm: str, cell: tuple[str, str], own: Sequence[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm, "workload": cell[0], "load": cell[1]}
    row |= {"rounds": len(own), "is_valid": all(run["is_valid"] for run in own)}
    row["level"], row["is_open"] = own[0]["level"], own[0]["is_open"]
    row |= {name: sum(run[name] for run in own) for name in _COUNTS}
    # Of all rounds together: a median would hide the one in which requests were lost.
    row["failure_rate"] = row["num_failed"] / max(1, row["num_sent"])
    row["tokens_counted_by_server"] = all(
        run["tokens_counted_by_server"] for run in own
    )
    for name in _SPREAD:
        values = [run[name] for run in own]
        # A round in which nothing was answered must not drop out of a latency.
        row[name] = None if None in values else asdict(spread(values))
    server = [run["server"] for run in own]
    for name in _SERVER_COUNTS:
        values = [one[name] for one in server if one.get(name) is not None]
        row[name] = sum(values) if values else None
    lengths = [s["acceptance_length"] for s in server if s.get("acceptance_length")]
    row["acceptance_length"] = asdict(spread(lengths)) if lengths else None
    verified, accepted = row["draft_tokens_verified"], row["draft_tokens_accepted"]
    row["verification_success_rate"] = accepted / verified if verified else None
    peaks = [s["replicas_max"] for s in server if s.get("replicas_max") is not None]
    row["replicas_max"] = max(peaks, default=None)
    failures: Counter[str] = Counter()
    for run in own:
        failures.update(run["failures"])
    row["failures"] = dict(failures)
    row["invalid_because"] = sorted({r for run in own for r in run["invalid_because"]})
    return row


def _flatten(run: Run, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in run.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            flat[prefix + name] = "; ".join(map(str, value))
        else:
            flat[prefix + name] = value
    return flat
