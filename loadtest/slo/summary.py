"""From answers to figures: who kept the target of its class, and how many a second."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from loadtest.engine.measurement import list_latencies
from loadtest.intervals import Table, compare_with_best, estimate_mean, show_ratio

Row = dict[str, Any]

BLOCK = ["load", "round", "block"]
TIMES = ("tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms")
"""Of each class."""

AIM_SOMEWHERE, AIM_EVERYWHERE = 1.5, 0.98
"""Times the best other policy's goodput, at one load at least and at all of them."""


def judge(result: Mapping[str, Any], targets_ms: Mapping[str, float]) -> Table:
    """Return a row for each request: class, latencies, whether it kept its target.

    A reply of one token has no time per token, and keeps every target.
    """
    frame = list_latencies(result).assign(**{"class": result["classes"]})
    targets = frame["class"].map(targets_ms)
    frame["kept"] = frame["tpot_ms"].isna() | (frame["tpot_ms"] <= targets)
    return frame


def measure_block(
    result: Mapping[str, Any], targets_ms: Mapping[str, float], block_s: float
) -> Row:
    """Return the figures of one arm in one block.

    `kept` is the share of requests within their target, of all and, as `CLASS.kept`,
    of a class. Goodput is those per second, while requests come and until the last of
    them has begun: who keeps targets by letting the others wait has to serve these
    too. How long the last replies take says nothing, and rewards who postpones them.
    """
    requests = judge(result, targets_ms)
    figures: Row = {
        "goodput_per_s": requests["kept"].sum() / max(block_s, *result["first_s"]),
        "tokens_per_s": requests["tokens"].sum() / result["seconds"],
        "kept": requests["kept"].mean(),
        "requests": len(requests),
        "seconds": result["seconds"],
        "other_cpu_share": result["other_cpu_share"],
    }
    for name, own in requests.groupby("class"):
        figures[f"{name}.kept"] = own["kept"].mean()
        for time in TIMES:
            what, share = time.removesuffix("_ms").split("_p")
            figures[f"{name}.{time}"] = own[f"{what}_ms"].quantile(int(share) / 100)
    return figures


def tabulate(
    results: Sequence[Mapping[str, Any]], targets_ms: Any, conditions: Mapping[str, Any]
) -> Table:
    """Return a row for each block and arm: its place and its figures.

    `differing` are the replies that are not the first arm's.
    """

    def place(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(one[key] for key in BLOCK)

    first = conditions["arms"][0]
    replies = {place(one): one["digests"] for one in results if one["arm"] == first}
    rows = [
        {key: one[key] for key in (*BLOCK, "arm")}
        | measure_block(one, targets_ms, conditions["block_s"])
        | {"differing": sum(map(operator.ne, one["digests"], replies[place(one)]))}
        for one in results
    ]
    return pd.DataFrame(rows).sort_values(BLOCK, kind="stable")


def average_rounds(blocks: Table) -> Table:
    """Return a row for each load, round and arm: means over its blocks.

    Blocks of a round run on the same engines, which are not like those of another.
    """
    place = ["load", "round", "arm"]
    return blocks.drop(columns="block").groupby(place, as_index=False).mean()


def summarise(rounds: Table, arms: Sequence[str]) -> list[Row]:
    """Return a row for each load and arm, in the order of `arms`.

    Means over rounds with half-widths of 95 % intervals.
    """
    figures = [name for name in rounds if name not in (*BLOCK, "arm")]
    return [
        {"load": load, "arm": arm}
        | {name: estimate_mean(own.loc[own["arm"] == arm, name]) for name in figures}
        for load, own in rounds.groupby("load")
        for arm in arms
    ]


def compare_goodput(rounds: Table, ours: str) -> list[Row]:
    """Compare our goodput at each load with the best other policy's, round by round.

    Our own policy told otherwise is no rival. All intervals hold together in 95 % of
    cases (Bonferroni).
    """
    policy = ours.partition(":")[0]
    confidence, found = 1 - 0.05 / rounds["load"].nunique(), []
    for load, own in rounds.groupby("load"):
        table = own.pivot(index="round", columns="arm", values="goodput_per_s")
        rivals = [name for name in table if name.partition(":")[0] != policy]
        if ours not in table:
            continue
        if best := compare_with_best(table, ours, rivals, confidence):
            found.append({"load": load, "arm": ours} | best)
    return found


def tell_verdict(over_best: Sequence[Row]) -> str:
    """Say in a sentence whether the aims are reached; nothing without a rival."""
    if not over_best:
        return ""

    def tell(aim: float, low: float, high: float) -> str:
        if low >= aim:
            return "is reached"
        return "is missed" if high < aim else "is neither shown nor refuted"

    # Without an interval anything may be true.
    lows = [one["low"] or 0.0 for one in over_best]
    highs = [one["high"] or math.inf for one in over_best]
    ranked = sorted(over_best, key=operator.itemgetter("ratio"))
    least, most = ranked[0], ranked[-1]
    return (
        f"Within their target `{most['arm']}` answers {show_ratio(most)} times as many "
        f"requests as the best other policy at load {most['load']:g}, where it gains "
        f"most, and {show_ratio(least)} times at load {least['load']:g}, where least. "
        f"The aim of {AIM_SOMEWHERE} somewhere "
        f"{tell(AIM_SOMEWHERE, max(lows), max(highs))}; that of {AIM_EVERYWHERE} "
        f"everywhere {tell(AIM_EVERYWHERE, min(lows), min(highs))}."
    )
