"""From measurements to results: one row per cell and policy, and ratios."""

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from loadtest.intervals import Table, compare_columns, compare_with_best, spread

Rows = list[dict[str, Any]]

ALL_LOADS = 0
"""In the place of a number of requests: the geometric mean over all of them."""

_LOAD = ["workload", "temperature"]
_CELL = [*_LOAD, "concurrency"]
_ARM = [*_CELL, "policy"]
_SUMS = ("window_s", "num_tokens", "num_steps")
_COUNTS = ("num_output_tokens", "num_requests", "num_differing_requests")
_MEANS = (
    *("acceptance_length", "itl_p50_ms", "itl_p99_ms", "time_per_token_p50_ms"),
    *("step_time_error", "calibration_error"),
)
_PHASES = {"phases.before": "before", "phases.after": "after"}


def by_round(measurements: Rows) -> Table:
    """Return a row for each cell, policy and round: sums and means over blocks."""
    keys, means = [*_ARM, "round"], [*_MEANS, *_PHASES]
    frame = pd.json_normalize(measurements, max_level=1)
    frame = frame.reindex(columns=[*keys, *_SUMS, *means])
    frame = frame.astype(dict.fromkeys(means, float))
    rounds = frame.groupby(keys, sort=False, as_index=False)
    rounds = rounds.agg(dict.fromkeys(_SUMS, "sum") | dict.fromkeys(means, "mean"))
    rounds["output_tokens_per_s"] = rounds["num_tokens"] / rounds["window_s"]
    rounds["step_ms"] = 1e3 * rounds["window_s"] / rounds["num_steps"]
    return rounds


def make_rows(measurements: Rows) -> Rows:
    """Summarise every cell and policy over its rounds.

    Counts are added up before they are divided; all else are medians over rounds. None
    where nobody counts: `none` runs on vLLM's scheduler.
    """
    rounds = dict(list(by_round(measurements).groupby(_ARM)))
    groups = pd.DataFrame(measurements).groupby(_ARM, sort=False)
    return [
        dict(zip(_ARM, key, strict=True)) | _make_row(rounds[key], blocks)
        for key, blocks in groups
    ]


def compare_with_others(measurements: Rows, ours: str) -> tuple[Rows, Rows]:
    """Compare the throughput of a policy with every other, paired by round.

    `ALL_LOADS` compares geometric means over the loads of a workload, in rounds that
    have them all.

    Returns:
        Ratios over each, and over the best of the others.
    """
    over_each, over_best = [], []
    for cell, speeds in _speeds(measurements):
        if ours not in speeds:
            continue
        place, others = {"policy": ours} | cell, [o for o in speeds if o != ours]
        for theirs in others:
            if found := compare_columns(speeds, ours, theirs):
                over_each.append(place | {"against": theirs} | found)
        if found := compare_with_best(speeds, ours, others):
            over_best.append(place | found)
    return over_each, over_best


def find_ceilings(rows: Rows) -> Rows:
    """Return what each fixed length would be over `none`, were all drafts accepted.

    By the step times that were measured: what better drafts could bring at these costs,
    at most. Prompts are in the mean step, and would weigh more in fewer steps.
    """
    table = pd.DataFrame(rows)[[*_ARM, "step_ms"]].astype({"step_ms": float})
    plain = table[table["policy"] == "none"].drop(columns="policy")
    lengths = table["policy"].str.extract(r"^fixed:(\d+)", expand=False)
    fixed = table.assign(tokens=1 + lengths.astype(float))
    both = fixed.merge(plain, on=_CELL, suffixes=("", "_plain")).dropna()
    both["ratio"] = both["tokens"] * both["step_ms_plain"] / both["step_ms"]
    return list(both[[*_ARM, "ratio"]].to_dict("records"))


def _speeds(measurements: Rows) -> list[tuple[dict[str, Any], Table]]:
    """Return tokens per second, `[round, policy]`, of every cell and over its loads."""
    found = []
    for load, own in by_round(measurements).groupby(_LOAD, sort=False):
        tables = {
            concurrency: cell.pivot(
                index="round", columns="policy", values="output_tokens_per_s"
            )[cell["policy"].unique()]
            for concurrency, cell in own.groupby("concurrency")
        }
        if len(tables) > 1:
            # Of rounds, and policies, that are there at every load.
            mean = np.exp(sum(map(np.log, tables.values())) / len(tables))
            tables[ALL_LOADS] = mean.dropna(axis="columns", how="all")
        place = dict(zip(_LOAD, load, strict=True))
        found += [(place | {"concurrency": n}, table) for n, table in tables.items()]
    return found


def _make_row(rounds: Table, blocks: Table) -> dict[str, Any]:
    counters = pd.DataFrame([one for one in blocks["counters"] if one])
    counted = counters.select_dtypes("number").sum().to_dict().get
    verified, steps = counted("num_verified_tokens"), counted("num_steps")
    fallbacks: Counter[str] = Counter()
    for reasons in counters.get("num_fallbacks", ()):
        fallbacks.update(reasons)
    medians = rounds[[*_MEANS, "step_ms"]].median().astype(object)
    starts = blocks.get("engine_start", pd.Series([None]))
    sums = blocks[list(_COUNTS)].sum().astype(object)
    if blocks["temperature"].iloc[0] > 0:
        sums["num_differing_requests"] = None  # Sampled replies differ anyway.
    phases = rounds[[*_PHASES]].rename(columns=_PHASES).dropna()
    return {
        "rounds": len(rounds),
        # Older measurements do not tell.
        "engine_starts": None if starts.isna().any() else starts.nunique(),
        "window_s": float(rounds["window_s"].sum()),
        "output_tokens_per_s": spread(rounds["output_tokens_per_s"]),
        "output_tokens_per_s_by_phase": None
        if phases.empty
        else {name: spread(speeds) for name, speeds in phases.items()},
        "verification_success_rate": _divide(counted("num_accepted_tokens"), verified),
        "verified_per_step": _divide(verified, steps),
        "planning_us_per_step": _divide(counted("planning_seconds_total"), steps, 1e6),
        "fallbacks": dict(fallbacks),
        "max_other_cpu_share": float(blocks["other_cpu_share"].max()),
        **sums,
        **medians.where(medians.notna(), None),
    }


def _divide(part: float | None, whole: float | None, unit: float = 1.0) -> float | None:
    return unit * part / whole if part is not None and whole else None
