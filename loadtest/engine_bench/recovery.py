"""How soon an arm is back at its best after conditions have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RECOVERED_SHARE = 0.98
"""Of the best arm's speed."""

WINDOW_STEPS = 50
"""Steps over which speed is measured: fewer would see single prompts, which take as
long as many decoding steps."""

Series = Mapping[str, Sequence[float]]
"""Since the change, by step: `end_ms` (time) and `tokens` (all so far)."""


def find_recovery(
    ours: Series,
    best: Series,
    share: float = RECOVERED_SHARE,
    window: int = WINDOW_STEPS,
) -> int | None:
    """Count the steps until an arm is as fast as the best one.

    Both arms answer the same requests in the same order, so they are compared over the
    same tokens: our time for those of a window of steps against the best arm's.

    Args:
        ours: The arm in question.
        best: The fastest arm under the new conditions.
        share: Of the best arm's speed that counts as recovered.
        window: Steps compared.

    Returns:
        The first step of the first window that is fast enough; None if there is none.
    """
    our_ms, our_tokens = _with_origin(ours)
    best_ms, best_tokens = _with_origin(best)
    last = int(np.searchsorted(our_tokens, best_tokens[-1], side="right")) - 1
    for start in range(last - window + 1):
        end = start + window
        taken_ms = our_ms[end] - our_ms[start]
        needed = np.interp(our_tokens[[start, end]], best_tokens, best_ms)
        if needed[1] - needed[0] >= share * taken_ms:
            return start
    return None


def recoveries(group: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Count the steps to recovery of every arm of one round.

    Args:
        group: Measurements of one cell in one round, all arms.

    Returns:
        By policy; {} where conditions did not change.
    """
    measured = [one for one in group if one.get("phases") and one.get("after_switch")]
    if not measured:
        return {}
    best = max(measured, key=lambda one: float(one["phases"]["after"]))
    return {
        one["policy"]: find_recovery(one["after_switch"], best["after_switch"])
        for one in measured
    }


def median_recovery(steps: Sequence[int | None]) -> float | None:
    """Return the median over rounds; None if half of them or more never recovered."""
    ranked = sorted(float("inf") if one is None else float(one) for one in steps)
    if not ranked:
        return None
    middle = 0.5 * (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2])
    return None if np.isinf(middle) else middle


def _with_origin(
    series: Series,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return (
        np.concatenate(([0.0], np.asarray(series["end_ms"], dtype=np.float64))),
        np.concatenate(([0.0], np.asarray(series["tokens"], dtype=np.float64))),
    )
