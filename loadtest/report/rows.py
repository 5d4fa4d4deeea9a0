"""From runs to results: a row for each arm and cell, and paired ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

Run = Mapping[str, Any]

_CONFIDENCE = 0.95
_CELL = ["workload", "load"]
COMPARED = (
    *("output_tokens_per_s", "goodput_per_s", "requests_per_s"),
    *("ttft_p50_ms", "tpot_p50_ms", "e2e_p50_ms"),
)
_SPREAD = (
    *("output_tokens_per_s", "input_tokens_per_s", "requests_per_s"),
    *("goodput_per_s", "goodput_share", "mean_in_flight"),
    *(f"{m}_p{p}_ms" for m in ("ttft", "itl", "tpot", "e2e") for p in (50, 95, 99)),
    *("cached_share", "client_cpu", "client_lag_ms", "send_lag_p99_ms", "machine_cpu"),
)
_COUNTS = (
    *("num_requests", "num_ok", "num_sent"),
    *("num_failed", "num_cut", "num_unfinished"),
)
_SERVER_COUNTS = (
    *(f"draft_tokens_{what}" for what in ("proposed", "verified", "accepted")),
    *("fallbacks", "preemptions"),
)
_OF_SERVER = (*_SERVER_COUNTS, "acceptance_length", "replicas_max")
FIGURES = (
    *(*_SPREAD, *_COUNTS, *_SERVER_COUNTS),
    *("failure_rate", "acceptance_length", "verification_success_rate"),
    *("replicas_max", "engine_starts"),
)
"""The numbers of a row, single ones and spreads."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times one arm's value is another's: geometric mean over rounds.

    With a single round there is no 95 % interval (None).
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Compare two arms round by round.

    What moves both arms of a round (the requests drawn, the machine's state) cancels
    in their ratio. Logarithms of ratios are taken as normal: t-interval on their mean.
    All values must be above 0, and there must be one.
    """
    logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
    ratio, count = float(np.exp(logs.mean())), len(logs)
    if count == 1:
        return Ratio(ratio, None, None, 1)
    half = stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1) * stats.sem(logs)
    return Ratio(
        ratio, float(ratio * np.exp(-half)), float(ratio * np.exp(half)), count
    )


def make_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise rounds: medians with range for figures, sums for counts.

    Runs that the client spoilt stay in, and mark their row.
    """
    groups = pd.DataFrame(runs).groupby([*_CELL, "arm"], sort=False)
    return [
        {"arm": arm, "workload": workload, "load": load, **_make_row(own)}
        for (workload, load, arm), own in groups
    ]


def make_ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare every arm with every earlier one, paired by round.

    Where a round of either has no figure, or nothing got through, there is no ratio:
    one of the other rounds alone would hide it.
    """
    frame, ratios = pd.DataFrame(runs), []
    for (workload, load), of_cell in frame.groupby(_CELL, sort=False):
        by_round = of_cell.pivot(index="round", columns="arm", values=list(COMPARED))
        for metric in COMPARED:
            values = by_round[metric].astype(float)
            arms = [arm for arm in frame["arm"].unique() if arm in values]
            for number, ours in enumerate(arms):
                for theirs in arms[:number]:
                    # Rounds that only one of them has had so far come in pieces.
                    had = of_cell.groupby("round")["arm"].agg(set)
                    both = values.loc[had[had >= {ours, theirs}].index, [ours, theirs]]
                    if len(both) and (both > 0).all(axis=None):
                        ratio = compare(both[ours].tolist(), both[theirs].tolist())
                        place = {"arm": ours, "against": theirs, "metric": metric}
                        place |= {"workload": workload, "load": load}
                        ratios.append(place | asdict(ratio))
    return ratios


def _make_row(own: pd.DataFrame) -> dict[str, Any]:
    server = pd.DataFrame(own["server"].tolist(), index=own.index)
    server = server.reindex(columns=[*_OF_SERVER]).astype(float)
    level = own["level"].iloc[0]
    row: dict[str, Any] = {
        "rounds": len(own),
        "is_valid": bool(own["is_valid"].all()),
        # Every round starts an engine anew, one that goes on in pieces more than once.
        "engine_starts": int(own["started_s"].nunique()),
        "level": None if pd.isna(level) else float(level),
        "is_open": bool(own["is_open"].iloc[0]),
        "tokens_counted_by_server": bool(own["tokens_counted_by_server"].all()),
        "failures": dict(sum(map(Counter, own["failures"]), Counter())),
        "invalid_because": sorted(set(own["invalid_because"].explode().dropna())),
    }
    row |= {name: int(own[name].sum()) for name in _COUNTS}
    # Of all rounds together: a median would hide the one in which requests were lost.
    row["failure_rate"] = row["num_failed"] / max(1, row["num_sent"])
    # A round in which nothing was answered must not drop out of a latency.
    for name in _SPREAD:
        row[name] = None if own[name].isna().any() else spread(own[name])
    sums = server[[*_SERVER_COUNTS]].sum(min_count=1)
    row |= {name: None if pd.isna(value) else value for name, value in sums.items()}
    row["acceptance_length"] = spread(server["acceptance_length"].dropna())
    verified, accepted = row["draft_tokens_verified"], row["draft_tokens_accepted"]
    row["verification_success_rate"] = accepted / verified if verified else None
    replicas = server["replicas_max"].max()
    row["replicas_max"] = None if pd.isna(replicas) else replicas
    return row


def spread(values: pd.Series) -> dict[str, float] | None:
    """Return median and range over rounds; None without any."""
    if values.empty:
        return None
    return {k: float(v) for k, v in values.agg(["median", "min", "max"]).items()}
