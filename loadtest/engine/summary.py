"""From measurements to results: one row per cell and policy, and ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from loadtest.report.rows import compare

from .outcome_bins import add_up_bins

Measurement = Mapping[str, Any]
Table = Any
"""A data frame: pandas has no types here."""

CELL = ["workload", "temperature", "concurrency"]
ALL_LOADS = 0
"""In the place of a number of requests: the geometric mean over all of them."""

_MEANS = (
    *("acceptance_length", "itl_p50_ms", "itl_p99_ms", "time_per_token_p50_ms"),
    "step_time_error",
)
_BINS = ("calibration_bins", "confidence_bins")


def by_round(measurements: Sequence[Measurement]) -> Table:
    """Add the blocks of every cell, policy and round up.

    Returns:
        Columns `CELL`, `policy`, `round`, `output_tokens_per_s`, `step_ms`, the sums
        `window_s`, `num_tokens`, `num_steps`, and means over blocks.
    """
    frame = pd.DataFrame(measurements)
    for phase in ("before", "after"):
        frame[phase] = [(one or {}).get(phase, np.nan) for one in frame["phases"]]
    frame[list(_MEANS)] = frame[list(_MEANS)].astype(float)
    rounds = frame.groupby([*CELL, "policy", "round"], sort=False, as_index=False).agg(
        **{name: (name, "sum") for name in ("window_s", "num_tokens", "num_steps")},
        **{name: (name, "mean") for name in (*_MEANS, "before", "after")},
    )
    rounds["output_tokens_per_s"] = rounds["num_tokens"] / rounds["window_s"]
    rounds["step_ms"] = 1e3 * rounds["window_s"] / rounds["num_steps"]
    return rounds


def make_rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Summarise every cell and policy over its rounds.

    Counts, and outcomes of predictions, are added up before they are divided; speeds,
    times and step-time errors are medians over rounds. None where nobody counts: `none`
    runs on vLLM's scheduler.

    `calibration_error` is the expected calibration error of the predictions made in
    the steady parts of this cell, `calibration_exact_error` what exact predictions
    would show by chance, `confidence_error` that of the drafter's confidence.
    """
    frame = pd.DataFrame(measurements)
    rounds = by_round(measurements).set_index([*CELL, "policy"]).sort_index()
    rows = []
    for key, own in frame.groupby([*CELL, "policy"], sort=False):
        workload, temperature, concurrency, policy = key
        place = {
            "policy": policy,
            "workload": workload,
            "temperature": float(temperature),
            "concurrency": int(concurrency),
        }
        blocks = own.to_dict("records")
        rows.append(place | _make_row(rounds.loc[[key]], blocks))
    return rows


def make_ratios(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Compare the throughput of every policy with every other, paired by round.

    Each pair is listed once, the later policy against the earlier; the other
    direction is the reciprocal. `ALL_LOADS` compares geometric means over the loads of
    a workload, in rounds that have them all.
    """
    ratios = []
    for cell, speeds in _speeds(measurements):
        arms = list(speeds)
        for number, ours in enumerate(arms):
            for theirs in arms[:number]:
                both = speeds[[ours, theirs]].dropna()
                if len(both):
                    ratio = compare(both[ours].tolist(), both[theirs].tolist())
                    place = {"policy": ours, "against": theirs}
                    ratios.append(place | cell | asdict(ratio))
    return ratios


def compare_with_best(
    measurements: Sequence[Measurement], ours: str
) -> list[dict[str, Any]]:
    """Compare a policy with the best of the others, paired by round.

    The fastest of many is partly the luckiest, and would be beaten less often in the
    rounds it was chosen by. So each round is compared with the policy that was the
    best, by its median, in the other rounds. That errs a little the other way: few
    rounds may choose one that is not the best.

    Returns:
        Rows as of `make_ratios`; `against` names the best of all rounds.
    """
    found = []
    for cell, speeds in _speeds(measurements):
        if ours not in speeds or len(speeds.columns) < 2:
            continue
        whole = speeds.dropna()
        others = whole.drop(columns=ours)
        if whole.empty:
            continue
        chosen = [
            (others.drop(index=number) if len(others) > 1 else others).median().idxmax()
            for number in others.index
        ]
        rivals = [
            others.loc[number, rival]
            for number, rival in zip(others.index, chosen, strict=True)
        ]
        ratio = compare(whole[ours].tolist(), rivals)
        best = others.median().idxmax()
        found.append({"policy": ours, "against": best} | cell | asdict(ratio))
    return found


def _speeds(measurements: Sequence[Measurement]) -> list[tuple[dict[str, Any], Table]]:
    """Return tokens per second, `[round, policy]`, of every cell and over its loads."""
    rounds = by_round(measurements)
    found = []
    for load, of_load in rounds.groupby(CELL[:2], sort=False):
        place = dict(zip(CELL[:2], load, strict=True))
        logs = []
        for concurrency, of_cell in of_load.groupby("concurrency"):
            speeds = of_cell.pivot(
                index="round", columns="policy", values="output_tokens_per_s"
            )[list(of_cell["policy"].unique())]
            found.append((place | {"concurrency": int(concurrency)}, speeds))
            logs.append(np.log(speeds))
        if len(logs) > 1:
            # Of rounds, and policies, that are there at every load.
            mean = np.exp(sum(logs[1:], logs[0]) / len(logs)).dropna(how="all")
            mean = mean.dropna(axis="columns", how="all")[
                [name for name in logs[0] if name in mean]
            ]
            if not mean.empty:
                found.append((place | {"concurrency": ALL_LOADS}, mean))
    return found


def _make_row(rounds: Table, blocks: Sequence[Measurement]) -> dict[str, Any]:
    verified = _total(blocks, "num_verified_tokens")
    accepted = _total(blocks, "num_accepted_tokens")
    starts = {one.get("engine_start") for one in blocks}
    row = {
        "rounds": len(rounds),
        # Older measurements do not tell.
        "engine_starts": None if None in starts else len(starts),
        "window_s": float(rounds["window_s"].sum()),
        "output_tokens_per_s": _spread(rounds["output_tokens_per_s"]),
        "verification_success_rate": _divide(accepted, verified),
        "verified_per_step": _divide(verified, _total(blocks, "num_steps")),
        "planning_us_per_step": _planning(blocks),
        "num_output_tokens": sum(one["num_output_tokens"] for one in blocks),
        "num_requests": sum(one["num_requests"] for one in blocks),
        # Sampled replies differ anyway.
        "num_differing_requests": None
        if blocks[0]["temperature"] > 0
        else sum(one["num_differing_requests"] for one in blocks),
        "fallbacks": dict(_add_up(blocks, "num_fallbacks")),
        "cut_tokens": dict(_add_up(blocks, "num_cut_tokens")),
        "max_other_cpu_share": max(one["other_cpu_share"] for one in blocks),
    }
    medians = rounds[[*_MEANS, "step_ms"]].median()
    row |= {name: None if np.isnan(x) else float(x) for name, x in medians.items()}
    row |= _calibration(blocks)
    if not rounds["after"].isna().all():
        row["output_tokens_per_s_by_phase"] = {
            phase: _spread(rounds[phase].dropna()) for phase in ("before", "after")
        }
    return row


def _calibration(blocks: Sequence[Measurement]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in _BINS:
        known = [one[name] for one in blocks if isinstance(one.get(name), Mapping)]
        row[name] = add_up_bins(known).as_dict() if known else None
    curves = {
        name: None if row[name] is None else add_up_bins([row[name]]).curve()
        for name in _BINS
    }
    calibrated, raw = (curves[name] for name in _BINS)
    return row | {
        "calibration_error": None if calibrated is None else calibrated.error,
        "calibration_exact_error": None
        if calibrated is None
        else calibrated.exact_error,
        "confidence_error": None if raw is None else raw.error,
    }


def _planning(blocks: Sequence[Measurement]) -> float | None:
    """Return microseconds a step that planning takes; None where it is not timed."""
    spent_s, steps = (
        _total(blocks, name) for name in ("planning_seconds_total", "num_steps")
    )
    return 1e6 * spent_s / steps if spent_s is not None and steps else None


def _spread(values: Table) -> dict[str, float]:
    """Return median and range over rounds."""
    return {k: float(v) for k, v in values.agg(["median", "min", "max"]).items()}


def _counters(blocks: Sequence[Measurement]) -> list[Mapping[str, Any]]:
    found = [one["counters"] for one in blocks]
    return [one for one in found if isinstance(one, Mapping)]


def _total(blocks: Sequence[Measurement], counter: str) -> float | None:
    values = [one[counter] for one in _counters(blocks) if counter in one]
    return sum(values) if values else None


def _add_up(blocks: Sequence[Measurement], counter: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in _counters(blocks):
        total.update(one.get(counter, {}))
    return total


def _divide(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
