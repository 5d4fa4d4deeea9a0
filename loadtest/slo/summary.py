"""From answers to figures: who kept the target of its class, and how many a second."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from loadtest.engine.summary import choose_rivals
from loadtest.intervals import compare, estimate_mean

Row = dict[str, Any]
Table = Any
"""A data frame: pandas has no types here."""

BLOCK = ["load", "round", "block"]
TIMES = ("tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms")
"""Of each class."""


def judge(result: Mapping[str, Any], targets_ms: Mapping[str, float]) -> Table:
    """Return a row for each request: class, times, tokens, whether it kept its target.

    The time per token is that between first and last token over the tokens after the
    first; a reply of one token has none, and keeps every target. The time to the first
    token counts from when the request was due.
    """
    frame = pd.DataFrame(
        {
            "class": result["classes"],
            "tokens": result["num_tokens"],
            "ttft_ms": 1e3 * (pd.Series(result["first_s"]) - result["due_s"]),
        }
    )
    decoding_ms = 1e3 * (pd.Series(result["last_s"]) - result["first_s"])
    frame["tpot_ms"] = decoding_ms / (frame["tokens"] - 1).where(frame["tokens"] > 1)
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


def compare_with_best(blocks: Table, ours: str) -> list[Row]:
    """Compare our goodput at each load with the best other policy's, block by block.

    Our own policy told otherwise is no rival. The rival of a block is the arm that is
    the best, by its median, in the other blocks, lest the luckiest be taken for the
    best; `against` names the best of all.
    """
    policy = ours.partition(":")[0]
    found = []
    for load, own in blocks.groupby("load"):
        table = own.pivot(
            index=["round", "block"], columns="arm", values="goodput_per_s"
        )
        rivals = [name for name in table if name.partition(":")[0] != policy]
        if ours not in table or not rivals:
            continue
        others = table[rivals].reset_index(drop=True)
        theirs, mine = choose_rivals(others), table[ours].tolist()
        place = {"load": load, "arm": ours, "against": others.median().idxmax()}
        if min(*mine, *theirs) > 0:
            found.append(place | compare(mine, theirs))
        elif sum(theirs) > 0:
            # Of nothing there is no logarithm, and of a mean ratio no interval.
            ratio = sum(mine) / sum(theirs)
            unknown = {"low": None, "high": None, "rounds": len(mine)}
            found.append(place | {"ratio": ratio} | unknown)
    return found
