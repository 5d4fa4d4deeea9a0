"""From answers to figures: who kept the target of its class, and how many a second."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from loadtest.engine.measurement import list_latencies
from loadtest.intervals import Table, compare_with_best, estimate_mean

Row = dict[str, Any]

BLOCK = ["load", "round", "block"]
TIMES = ("tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms")
"""Of each class."""


def judge(result: Mapping[str, Any], targets_ms: Mapping[str, float]) -> Table:
    """Return a row for each request: class, latencies, whether it kept its target.

    A reply of one token has no time per token, and keeps every target.
    """
    frame = list_latencies(result).assign(**{"class": result["classes"]})
    targets = frame["class"].map(targets_ms)
    frame["kept"] = frame["tpot_ms"].isna() | (frame["tpot_ms"] <= targets)
    return frame


def measure_block(result: Mapping[str, Any], targets_ms: Mapping[str, float]) -> Row:
    """Return the figures of one arm in one block.

    `kept` is the share of requests within their target, of all and, as `CLASS.kept`,
    of a class. Goodput is those per second, until the last one is answered: who keeps
    targets by letting the others wait has to answer these too.
    """
    requests, seconds = judge(result, targets_ms), result["seconds"]
    figures: Row = {
        "goodput_per_s": requests["kept"].sum() / seconds,
        "tokens_per_s": requests["tokens"].sum() / seconds,
        "kept": requests["kept"].mean(),
        "requests": len(requests),
        "seconds": seconds,
    }
    for name, own in requests.groupby("class"):
        figures[f"{name}.kept"] = own["kept"].mean()
        for time in TIMES:
            what, share = time.removesuffix("_ms").split("_p")
            figures[f"{name}.{time}"] = own[f"{what}_ms"].quantile(int(share) / 100)
    return figures


def tabulate(results: Sequence[Mapping[str, Any]], targets_ms: Any) -> Table:
    """Return a row for each block and arm: its place and its figures."""
    rows = [
        {key: one[key] for key in (*BLOCK, "arm")} | measure_block(one, targets_ms)
        for one in results
    ]
    return pd.DataFrame(rows).sort_values(BLOCK, kind="stable")


def summarise(blocks: Table, arms: Sequence[str]) -> list[Row]:
    """Return a row for each load and arm, in the order of `arms`.

    Means over blocks with half-widths of 95 % intervals.
    """
    figures = [name for name in blocks if name not in (*BLOCK, "arm")]
    return [
        {"load": load, "arm": arm}
        | {name: estimate_mean(own.loc[own["arm"] == arm, name]) for name in figures}
        for load, own in blocks.groupby("load")
        for arm in arms
    ]


def compare_goodput(blocks: Table, ours: str) -> list[Row]:
    """Compare our goodput at each load with the best other policy's, block by block.

    Our own policy told otherwise is no rival.
    """
    policy = ours.partition(":")[0]
    found = []
    for load, own in blocks.groupby("load"):
        table = own.pivot(
            index=["round", "block"], columns="arm", values="goodput_per_s"
        )
        rivals = [name for name in table if name.partition(":")[0] != policy]
        if ours in table and (best := compare_with_best(table, ours, rivals)):
            found.append({"load": load, "arm": ours} | best)
    return found
