"""Spread over rounds, and ratios of arms that were measured side by side."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over rounds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class BestRatio:
    """How many times the best rival's value an arm's is.

    Attributes:
        rival: The best of all rounds, by median.
        ratio: As in `Ratio`, each round's against the best of the *other* rounds.
        plain: Against `rival` in every round.
        chosen: In how many rounds each was what `ratio` compares with.
    """

    rival: str
    ratio: Ratio
    plain: Ratio
    chosen: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times one arm's value is another's.

    Attributes:
        ratio: Geometric mean over rounds of the ratio within a round.
        low: Lower end of the 95 % interval; None with a single round.
        high: Upper end.
        rounds: Rounds in which both were measured.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def half_width(self) -> float | None:
        """Half the interval's width; None with a single round."""
        if self.low is None or self.high is None:
            return None
        return 0.5 * (self.high - self.low)


def spread(values: Sequence[float]) -> Spread:
    """Return median, smallest and largest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def compare(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """Compare two arms round by round.

    What moves both arms of a round (the requests drawn, the machine's state) cancels
    in their ratio. Logarithms of ratios are taken as normal: t-interval on their mean.

    Args:
        ours: Round to value, > 0.
        theirs: The same of the other arm.

    Returns:
        The ratio; None without a common round.
    """
    common = sorted(ours.keys() & theirs.keys())
    return _summarise([math.log(ours[number] / theirs[number]) for number in common])


def compare_with_best(
    ours: Mapping[int, float], rivals: Mapping[str, Mapping[int, float]]
) -> BestRatio | None:
    """Compare an arm with the best of its rivals, round by round.

    The fastest of many arms is partly the luckiest, and would be beaten less often in
    the rounds it was chosen by. So each round is compared with the arm that was the
    best, by median, in the other rounds.

    That errs a little the other way: a few rounds may choose an arm that is not the
    best and easier to beat. On average the truth lies between this ratio and `plain`.

    Args:
        ours: Round to value, > 0.
        rivals: The same of every rival, by name.

    Returns:
        The ratio; None without a round in which all were measured. With a single round
        there are no others to choose by: it chooses itself.
    """
    common = sorted(set(ours).intersection(*rivals.values())) if rivals else []
    if not common:
        return None
    logs = []
    chosen: Counter[str] = Counter()
    for number in common:
        others = [one for one in common if one != number] or common
        rival = _best_by_median(rivals, others)
        chosen[rival] += 1
        logs.append(math.log(ours[number] / rivals[rival][number]))
    best = _best_by_median(rivals, common)
    ratio = _summarise(logs)
    plain = compare({number: ours[number] for number in common}, rivals[best])
    assert ratio is not None
    assert plain is not None
    return BestRatio(best, ratio, plain, dict(chosen.most_common()))


def _best_by_median(
    rivals: Mapping[str, Mapping[int, float]], rounds: Sequence[int]
) -> str:
    return max(
        rivals,
        key=lambda name: statistics.median(rivals[name][number] for number in rounds),
    )


def _summarise(logs: Sequence[float]) -> Ratio | None:
    if not logs:
        return None
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    half = t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(
        math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs)
    )


def t_975(degrees: int) -> float:
    """Return Student's t at 97.5 %.

    Beyond the table, the first terms of its expansion around the normal quantile,
    good to three decimals.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees)
