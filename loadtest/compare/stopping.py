"""How many rounds are enough: until ratios of throughput are known well."""

import argparse
import math
import time
from collections.abc import Sequence
from itertools import combinations

from loadtest.report.rows import Run, make_ratios

from .arms import Arm
from .runner import Runner, Store

_STEP = 4
"""Rounds between two looks at the ratios: of four arms each has begun once more."""


def measure_until(runner: Runner, store: Store, options: argparse.Namespace) -> bool:
    """Measure `--rounds`, or fewer where `--until-half-width` is reached before.

    Returns:
        Whether all that is needed has been measured.
    """
    most, wanted, began_s = options.rounds, options.until_half_width, time.monotonic()
    for rounds in (*(range(_STEP, most, _STEP) if wanted else ()), most):
        runner.rounds, minutes = rounds, options.minutes
        if minutes is not None:
            minutes -= (time.monotonic() - began_s) / 60
        if not runner.measure(minutes):
            return False
        kept = [run for run in store.runs() if run["round"] <= rounds]
        if wanted and find_half_width(kept, options.arms) <= wanted:
            break
    return True


def find_half_width(runs: Sequence[Run], arms: Sequence[Arm]) -> float:
    """Return the largest half-width of a 95 % interval; inf where there is none.

    It is that of output tokens per second of a policy under us and under vLLM alone.
    """
    pairs = [
        {a.name, b.name}
        for a, b in combinations(arms, 2)
        if a.policy == b.policy and a.is_plain_vllm != b.is_plain_vllm
    ]
    widths = [
        (one["high"] - one["low"]) / 2
        for one in make_ratios(runs)
        if one["metric"] == "output_tokens_per_s"
        and one["low"] is not None
        and {one["arm"], one["against"]} in pairs
    ]
    return max(widths, default=math.inf)
