"""How soon an arm is back at its best after conditions have changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .comparison import t_975

Array = NDArray[np.float64]

RECOVERED_SHARE = 0.98
"""Of the speed of the best other arm."""

WINDOW_STEPS = 25
"""Steps over which speed is measured: fewer would see single prompts, which take as
long as several decoding steps."""

HEAD_STEPS = 5
"""A window must also begin fast: a slow step or two would drown in all of it."""

HOLD_STEPS = 50
"""Steps for which speed must stay, window by window, or until the end."""

_TOLERANCE = 1e-9

Series = Mapping[str, Sequence[float]]
"""Since the change, by step: `end_ms` (time) and `tokens` (all so far)."""

Pair = tuple[Series, Series]
"""One round: the arm in question, and the arm it is compared with."""

Measurement = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Steps from the change until an arm is, and stays, as fast as the best other one.

    Attributes:
        rival: The best other arm under the new conditions.
        steps: By the mean over rounds; None if it never is.
        least_steps: By the upper end of the 95 % interval of that mean: fewer are
            ruled out. Equal to `steps` in a single round.
        steps_seen: Steps at which a window begins: later ones cannot be judged.
        rounds: Rounds measured.
    """

    rival: str
    steps: int | None
    least_steps: int | None
    steps_seen: int
    rounds: int


def find_recoveries(measurements: Sequence[Measurement]) -> dict[str, Recovery]:
    """Find the recovery of every arm of a cell.

    Each is compared with the fastest of the *others*: the fastest of all would be as
    fast as itself from the first step on.

    Args:
        measurements: Of one cell, all arms and rounds.

    Returns:
        By policy; {} where conditions did not change or there is one arm alone.
    """
    by_arm: dict[str, dict[int, Measurement]] = {}
    for one in measurements:
        if one.get("phases") and one.get("after_switch"):
            by_arm.setdefault(one["policy"], {})[one["round"]] = one
    found = {}
    for policy, own in by_arm.items():
        others = {name: _speed(rounds) for name, rounds in by_arm.items()}
        del others[policy]
        if not others:
            continue
        rival = max(others, key=lambda name: others[name])
        pairs = [
            (own[number]["after_switch"], by_arm[rival][number]["after_switch"])
            for number in sorted(own.keys() & by_arm[rival].keys())
        ]
        if pairs:
            found[policy] = compare_rounds(rival, pairs)
    return found


def compare_rounds(rival: str, pairs: Sequence[Pair]) -> Recovery:
    """Find when one arm is as fast as another, over rounds."""
    windows, heads = (
        _mean_paces(pairs, length) for length in (WINDOW_STEPS, HEAD_STEPS)
    )
    return Recovery(
        rival=rival,
        steps=_first_lasting(windows[0], heads[0]),
        least_steps=_first_lasting(windows[1], heads[1]),
        steps_seen=windows[0].size,
        rounds=len(pairs),
    )


def measure_pace(ours: Series, theirs: Series, length: int) -> Array:
    """Compare the speed of two arms, stretch of steps by stretch.

    Both answer the same requests in the same order, so they are compared over the same
    tokens: the other arm's time for those of our next `length` steps over our own.

    Returns:
        `[num_starts]`, log of the ratio by first step, above 0 where we are faster;
        empty if the series are too short.
    """
    our_ms, our_tokens = _with_origin(ours)
    their_ms, their_tokens = _with_origin(theirs)
    last = int(np.searchsorted(our_tokens, their_tokens[-1], side="right")) - 1
    starts = np.arange(max(0, last - length + 1))
    needed_ms = np.interp(our_tokens, their_tokens, their_ms)
    needed = needed_ms[starts + length] - needed_ms[starts]
    taken = our_ms[starts + length] - our_ms[starts]
    ratio: Array = np.log(np.maximum(needed, 1e-9) / np.maximum(taken, 1e-9))
    return ratio


def _mean_paces(pairs: Sequence[Pair], length: int) -> tuple[Array, Array]:
    """Return the mean over rounds, and the upper end of its 95 % interval."""
    paces = [measure_pace(ours, theirs, length) for ours, theirs in pairs]
    shortest = min(pace.size for pace in paces)
    stacked = np.stack([pace[:shortest] for pace in paces])
    mean: Array = stacked.mean(axis=0)
    if len(paces) == 1:
        return mean, mean
    deviation = stacked.std(axis=0, ddof=1)
    half = t_975(len(paces) - 1) * deviation / math.sqrt(len(paces))
    return mean, mean + half


def _first_lasting(windows: Array, heads: Array) -> int | None:
    enough = math.log(RECOVERED_SHARE) - _TOLERANCE
    is_fast = windows >= enough
    for start in range(windows.size):
        lasts = bool(is_fast[start : start + HOLD_STEPS + 1].all())
        if lasts and heads[start] >= enough:
            return start
    return None


def _speed(rounds: Mapping[int, Measurement]) -> float:
    """Return the geometric mean over rounds of the speed after the change."""
    return statistics.geometric_mean(
        float(one["phases"]["after"]) for one in rounds.values()
    )


def _with_origin(series: Series) -> tuple[Array, Array]:
    return (
        np.concatenate(([0.0], np.asarray(series["end_ms"], dtype=np.float64))),
        np.concatenate(([0.0], np.asarray(series["tokens"], dtype=np.float64))),
    )
