"""From runs to results: a row for each arm and cell, and paired ratios."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pandas as pd

from loadtest.intervals import compare, spread

Run = Mapping[str, Any]

_CELL = ["workload", "load"]

CPU_METRICS = tuple(f"{who}cpu_ms_per_token" for who in ("", "engine_", "ray_"))
"""Of all processes but engines and Ray's daemons; of engines; of Ray's daemons."""

COMPARED = (
    *("output_tokens_per_s", "goodput_per_s", "requests_per_s"),
    *("ttft_p50_ms", "tpot_p50_ms", "e2e_p50_ms", CPU_METRICS[0]),
)
_SPREAD = (
    *("output_tokens_per_s", "input_tokens_per_s", "requests_per_s"),
    *("goodput_per_s", "goodput_share", "mean_in_flight"),
    *(f"{m}_p{p}_ms" for m in ("ttft", "itl", "tpot", "e2e") for p in (50, 95, 99)),
    *("cached_share", "client_cpu", "client_lag_ms", "send_lag_p99_ms", "machine_cpu"),
    *CPU_METRICS,
)
_COUNTS = (
    *("num_requests", "num_ok", "num_sent"),
    *("num_failed", "num_cut", "num_unfinished"),
)
_SERVER_COUNTS = (
    *(f"draft_tokens_{what}" for what in ("proposed", "verified", "accepted")),
    *("fallbacks", "preemptions"),
)
FIGURES = (
    *(*_SPREAD, *_COUNTS, *_SERVER_COUNTS),
    *("failure_rate", "acceptance_length", "verification_success_rate"),
    *("replicas_max", "engine_starts"),
)
"""The numbers of a row, single ones and spreads."""


def make_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise rounds: medians with range for figures, sums for counts.

    Runs that the client spoilt stay in, and mark their row.
    """
    groups = _to_table(runs).groupby([*_CELL, "arm"], sort=False)
    return [
        {"arm": arm, "workload": workload, "load": load, **_make_row(own)}
        for (workload, load, arm), own in groups
    ]


def make_ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare every arm with every earlier one, paired by round.

    Where a round of either has no figure, or nothing got through, there is no ratio:
    one of the other rounds alone would hide it.
    """
    frame, ratios = _to_table(runs), []
    arms = frame["arm"].unique()
    for cell, of_cell in frame.groupby(_CELL, sort=False):
        # Rounds that only one of two has had so far come in pieces.
        had = of_cell.groupby("round")["arm"].agg(set)
        by_round = of_cell.pivot(index="round", columns="arm", values=list(COMPARED))
        for metric in COMPARED:
            values = by_round[metric].astype(float)
            for theirs, ours in combinations([a for a in arms if a in values], 2):
                both = values.loc[had[had >= {ours, theirs}].index, [ours, theirs]]
                if len(both) and (both > 0).all(axis=None):
                    place = {"arm": ours, "against": theirs, "metric": metric}
                    place |= dict(zip(_CELL, cell, strict=True))
                    ratios.append(place | compare(both[ours], both[theirs]))
    return ratios


def _to_table(runs: Sequence[Run]) -> pd.DataFrame:
    table = pd.DataFrame(runs)
    # Runs of before the figures were taken have none.
    more = [*CPU_METRICS, "cpu_ms_per_token_by_role"]
    return table.reindex(columns=table.columns.union(more, sort=False))


def _make_row(own: pd.DataFrame) -> dict[str, Any]:
    names = [*_SERVER_COUNTS, "acceptance_length", "replicas_max"]
    server = pd.DataFrame(own["server"].tolist()).reindex(columns=names).astype(float)
    counts = server[[*_SERVER_COUNTS]].sum(min_count=1)
    counts["replicas_max"] = server["replicas_max"].max()
    verified, accepted = (
        counts[f"draft_tokens_{what}"] for what in ("verified", "accepted")
    )
    counts["verification_success_rate"] = accepted / verified if verified else None
    row: dict[str, Any] = {
        "rounds": len(own),
        "is_valid": bool(own["is_valid"].all()),
        # Every round starts an engine anew, one that goes on in pieces more than once.
        "engine_starts": int(own["started_s"].nunique()),
        "level": _known(own["level"].iloc[0]),
        "is_open": bool(own["is_open"].iloc[0]),
        "tokens_counted_by_server": bool(own["tokens_counted_by_server"].all()),
        "failures": dict(sum(map(Counter, own["failures"]), Counter())),
        "invalid_because": sorted(set(own["invalid_because"].explode().dropna())),
        **{name: int(own[name].sum()) for name in _COUNTS},
        # A round in which nothing was answered must not drop out of a latency.
        **{
            name: None if own[name].isna().any() else spread(own[name])
            for name in _SPREAD
        },
        **{name: _known(value) for name, value in counts.items()},
        "acceptance_length": spread(server["acceptance_length"].dropna()),
        "cpu_ms_per_token_by_role": _median_by_role(own["cpu_ms_per_token_by_role"]),
    }
    # Of all rounds together: a median would hide the one in which requests were lost.
    row["failure_rate"] = row["num_failed"] / max(1, row["num_sent"])
    return row


def _median_by_role(rounds: pd.Series) -> dict[str, float]:
    table = pd.DataFrame([by_role for by_role in rounds.dropna() if by_role])
    return {str(k): float(v) for k, v in table.fillna(0.0).median().items()}


def _known(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
