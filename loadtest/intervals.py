"""Intervals and spreads over rounds: the same for every benchmark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

_CONFIDENCE = 0.95

Table = Any
"""A data frame: pandas has no types here."""


def estimate_mean(
    values: Any, confidence: float = _CONFIDENCE
) -> dict[str, float | None]:
    """Return mean and half-width of its t-interval; None where unknown."""
    known = np.asarray(values, float)
    known = known[~np.isnan(known)]
    count, half = len(known), None
    if count > 1:
        half = float(stats.t.ppf((1 + confidence) / 2, count - 1) * stats.sem(known))
    return {"mean": float(known.mean()) if count else None, "half_width": half}


def compare(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = _CONFIDENCE
) -> dict[str, Any]:
    """Compare two arms round by round: how many times one's value is another's.

    What moves both arms of a round (the requests drawn, the machine's state) cancels
    in their ratio. Logarithms of ratios are taken as normal. All values must be above
    0, and there must be one.

    Returns:
        `ratio`, a geometric mean over `rounds`, with its interval `low`, `high`; None
        with a single round.
    """
    logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
    mean, half = logs.mean(), estimate_mean(logs, confidence)["half_width"]
    low = high = None
    if half is not None:
        low, high = np.exp([mean - half, mean + half]).tolist()
    ratio = float(np.exp(mean))
    return {"ratio": ratio, "low": low, "high": high, "rounds": len(logs)}


def compare_columns(
    table: Table, ours: str, theirs: str | None
) -> dict[str, Any] | None:
    """Compare two columns over the rows that have both; None where there are none."""
    if ours == theirs or not {ours, theirs} <= {*table}:
        return None
    both = table[[ours, theirs]].dropna()
    return compare(both[ours], both[theirs]) if len(both) else None


def compare_with_best(
    table: Table, ours: str, rivals: Sequence[str], confidence: float = _CONFIDENCE
) -> dict[str, Any] | None:
    """Compare a column with the best of others, over the rows that have them all.

    The fastest of many is partly the luckiest, and would be beaten less often in the
    rows it was chosen by. So each row is compared with the rival that was the best, by
    its median, in the other rows; `against` names the best of all. That errs a little
    the other way: few rows may choose one that is not the best.

    Returns:
        As `compare`, without an interval where somebody has 0: of nothing there is no
        logarithm, and of a mean ratio no interval. None without rivals or rows.
    """
    whole = table[[ours, *rivals]].dropna().reset_index(drop=True)
    if whole[[*rivals]].empty:
        return None
    best, mine = whole[[*rivals]].median().idxmax(), whole[ours].tolist()
    theirs = pick_best(whole[[*rivals]])
    if min(*mine, *theirs) > 0:
        return {"against": best} | compare(mine, theirs, confidence)
    if sum(theirs) <= 0:
        return None
    found = {"against": best, "ratio": sum(mine) / sum(theirs)}
    return found | {"low": None, "high": None, "rounds": len(mine)}


def pick_best(table: Table) -> list[float]:
    """Return each row's value of the column that is best, by median, in the others."""
    found = []
    for number, values in table.iterrows():
        rest = table.drop(index=number) if len(table) > 1 else table
        found.append(float(values[rest.median().idxmax()]))
    return found


def spread(values: pd.Series) -> dict[str, float] | None:
    """Return median and range over rounds; None without any."""
    if values.empty:
        return None
    return {k: float(v) for k, v in values.agg(["median", "min", "max"]).items()}


def show_mean(estimate: Mapping[str, float | None]) -> str:
    """Write what `estimate_mean` returns, e.g. `1.50 ± 0.20`; nothing if unknown."""
    mean, half = estimate["mean"], estimate["half_width"]
    if mean is None:
        return ""
    digits = 2 if abs(mean) < 10 else 1 if abs(mean) < 100 else 0
    around = "" if half is None else f" ± {half:.{digits}f}"
    return f"{mean:,.{digits}f}{around}"


def show_ratio(
    found: Mapping[str, Any] | None, digits: int = 2, to: str = " to "
) -> str:
    """Write what `compare` returns, e.g. `1.50 (1.20 to 1.80)`; nothing for None."""
    if found is None:
        return ""
    ratio, low, high = (found[name] for name in ("ratio", "low", "high"))
    around = "" if low is None else f" ({low:.{digits}f}{to}{high:.{digits}f})"
    return f"{ratio:.{digits}f}{around}"
