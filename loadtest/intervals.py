"""Intervals and spreads over rounds: the same for every benchmark."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

_CONFIDENCE = 0.95


def estimate_mean(values: Any) -> dict[str, float | None]:
    """Return mean and half-width of its 95 % t-interval; None where unknown."""
    known = np.asarray(values, float)
    known = known[~np.isnan(known)]
    count, half = len(known), None
    if count > 1:
        half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1) * stats.sem(known))
    return {"mean": float(known.mean()) if count else None, "half_width": half}


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Compare two arms round by round: how many times one's value is another's.

    What moves both arms of a round (the requests drawn, the machine's state) cancels
    in their ratio. Logarithms of ratios are taken as normal. All values must be above
    0, and there must be one.

    Returns:
        `ratio`, a geometric mean over `rounds`, with its 95 % interval `low`, `high`;
        None with a single round.
    """
    logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
    mean, half = logs.mean(), estimate_mean(logs)["half_width"]
    low = high = None
    if half is not None:
        low, high = np.exp([mean - half, mean + half]).tolist()
    ratio = float(np.exp(mean))
    return {"ratio": ratio, "low": low, "high": high, "rounds": len(logs)}


def spread(values: pd.Series) -> dict[str, float] | None:
    """Return median and range over rounds; None without any."""
    if values.empty:
        return None
    return {k: float(v) for k, v in values.agg(["median", "min", "max"]).items()}
