"""How one sample moves what is known about prices: an extended Kalman filter.

    log(sample) = level + noise
                + log(base[count] * exp(deviation[count]) + slope * extra + constant)

Base prices come from the start-up profile. Level, deviations, slope and constant are
learnt together, and what is not known about them apart is known as such: a sample that
several could explain moves each by its share of the doubt. Fitted one after the other
they take each other's part. While the load grows, batches and contexts grow as one, and
the price of tokens was booked as that of context: 40 times too much of it, and tokens
all but free.

The constant is 0 until a sudden shift, which may be of either kind. A throttled clock
makes every price a multiple. A neighbour on a core makes every parallel region wait for
a time slice: on two cores a pass over 4 tokens went from 40 to 420 ms, one over 28 from
75 to 480. Taken for a multiple, verifying looks four times as dear as it is.

Source: ours; the filter is the textbook's (Jazwinski 1970), strong tracking as in Zhou
and Frank (1996).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from policies.compiled import compiled
from policies.estimators.curves import FIRST_KNOT, locate, read_between

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL_DOUBT, PRIOR_LEVEL_DOUBT = 0.3, 2.0
"""Standard deviation of the level, in logarithms: of a profile, whose passes carry no
context and sample nothing, and of a prior, which knows no machine."""

SHAPE_DOUBT, PRIOR_SHAPE_DOUBT = 0.2, 0.5
"""The same of deviations. Those of neighbouring counts are alike: every doubling of the
count halves (by `exp(-1)`) what one says about the other."""

OWN_DOUBT = 0.03
"""The same of what a count has to itself: kernels change their tiling there."""

EXTRA_DOUBT = 1e-4
"""Standard deviation of the slope, as a share of the price of 1. A KV position is 1e-5
of the weights in a model of 8 B parameters, 1e-4 of a step of the demo target."""

LEVEL_WANDER = 0.3
"""By how much the level changes from sample to sample, as a share of their noise:
clocks are throttled, neighbours come and go. It is what keeps a slow spell from making
whatever counts came up in it look dear: shapes are learnt from how samples differ from
those shortly before."""

FORGET = 0.0002
"""Share of the first doubt about shape and slope that returns with every sample: about
5000 are remembered. What returns must stay well below `LEVEL_WANDER`, or a machine that
slows down looks like a new shape at the counts of the moment, or like a dearer
context."""

FIRST_NOISE, NOISE_RANGE, NOISE_RATE = 0.1, (0.02, 0.5), 0.02
"""By how much samples scatter, at first, at least and at most, and by which share of
the way a sample moves it."""

OUTLIER = 2.5
"""Deviations beyond which a sample counts as one of so many: a page fault or a
neighbour's burst is not a new price."""

SHIFT_SAMPLES = 2
"""Outliers in a row to the same side that are a new level after all."""


SLOPE, CONSTANT = -2, -1
"""Where these two stand, behind the level (0) and the deviations."""

LEAST_VARIANCE = 1e-6
"""Of a price, in logarithms: below it two are known equally well."""

LEAST_MS, MOST_MS = 1e-4, 1e7
"""What a sample can be, three hours at most. A clock that says otherwise is taken for
the nearer of the two."""

LEAST_SPREAD = 1e-9
"""Share of a variance that must be left, once something else is known, for there to be
anything to learn from it: less is rounding."""

MOST_CHANGE = 2.0 * math.log(MOST_MS / LEAST_MS)
"""Of level and deviations, in logarithms: past it a price makes no sense."""


class Clock(NamedTuple):
    """What is known about the samples themselves.

    Attributes:
        noise: Standard deviation around the prediction, in logarithms.
        num_outliers: In a row, below 0 if they were too fast.
    """

    noise: float = FIRST_NOISE
    num_outliers: int = 0


def doubt_about(
    knots: NDArray[np.float64], *, profiled: bool, extra_doubt: float
) -> NDArray[np.float64]:
    """Return the covariance before the first sample, `[num_knots + 3, num_knots + 3]`.

    Its rows are those of `learn_sample`'s `mean`.

    Args:
        knots: `[num_knots]`, > 0, counts with a deviation.
        profiled: Base prices were measured.
        extra_doubt: Standard deviation of the slope in milliseconds; 0 for no extra.
    """
    size = knots.size
    level, shape = LEVEL_DOUBT, SHAPE_DOUBT
    if not profiled:
        level, shape = PRIOR_LEVEL_DOUBT, PRIOR_SHAPE_DOUBT
    doublings = np.log2(knots)
    distance = np.abs(doublings[:, None] - doublings[None, :])
    doubt = np.zeros((size + 3, size + 3))
    doubt[0, 0] = level**2
    doubt[1:-2, 1:-2] = shape**2 * np.exp(-distance) + OWN_DOUBT**2 * np.eye(size)
    doubt[SLOPE, SLOPE] = extra_doubt**2
    return doubt


@compiled
def learn_sample(
    mean: NDArray[np.float64],
    doubt: NDArray[np.float64],
    first_doubt: NDArray[np.float64],
    clock: Clock,
    knot_xs: NDArray[np.float64],
    xs: NDArray[np.float64],
    base_ys: NDArray[np.float64],
    count: float,
    measured_ms: float,
    extra: float,
) -> tuple[Clock, bool]:
    """Learn from one sample; the first two arrays change in place.

    Args:
        mean: `[num_knots + 3]`: level, deviations, slope, constant.
        doubt: `[num_knots + 3, num_knots + 3]`, their covariance.
        first_doubt: Same shape, from `doubt_about`.
        clock: Of the samples.
        knot_xs: `[num_knots + 3]`, from `curves.place_points`.
        xs: `[num_points]`, the points of the base curve.
        base_ys: `[num_points]`.
        count: Tokens or requests, > 0, as padded.
        measured_ms: What they took, > 0.
        extra: >= 0.

    Returns:
        The clock anew, and whether what is known makes sense; if not, nothing that was
        learnt can be used any more.
    """
    size = mean.size
    measured_ms = min(max(measured_ms, LEAST_MS), MOST_MS)
    left, share = weigh(knot_xs, count)
    right = min(left + 1, size - 4)
    deviation = (1.0 - share) * mean[1 + left] + share * mean[1 + right]
    plain = read_between(base_ys, *locate(xs, count)) * math.exp(deviation)
    whole = plain + mean[SLOPE] * extra + mean[CONSTANT]
    _forget(doubt, first_doubt)
    doubt[0, 0] += (LEVEL_WANDER * clock.noise) ** 2
    miss = math.log(measured_ms / whole) - mean[0]
    along = np.empty(size)
    variance = _look_along(
        doubt, left, right, share, plain, extra, whole, clock.noise, along
    )
    num_outliers = 0
    if abs(miss) > OUTLIER * math.sqrt(variance):
        num_outliers = max(clock.num_outliers, 0) + 1
        if miss < 0.0:
            num_outliers = min(clock.num_outliers, 0) - 1
        if abs(num_outliers) >= SHIFT_SAMPLES:
            # Everything at once, as when a core is lost: no matter of counts or extra.
            whole = _shift(mean, doubt, whole, miss)
            miss = 0.0
            variance = _look_along(
                doubt, left, right, share, plain, extra, whole, clock.noise, along
            )
    limit = OUTLIER * math.sqrt(variance)
    step = min(max(miss, -limit), limit) / variance
    for row in range(size):
        mean[row] += along[row] * step
        for column in range(size):
            doubt[row, column] -= along[row] * along[column] / variance
    _keep_positive(mean, doubt)
    # The mean of a deviation's size is .8 of the standard deviation.
    scatter = 1.25 * min(abs(miss), 4.0 * clock.noise)
    noise = clock.noise + NOISE_RATE * (scatter - clock.noise)
    least, most = NOISE_RANGE
    noise = min(max(noise, least), most)
    return Clock(noise, num_outliers), _makes_sense(mean, doubt)


@compiled
def _keep_positive(mean: NDArray[np.float64], doubt: NDArray[np.float64]) -> None:
    """Move to the likeliest state whose slope and constant are not below 0.

    More context never makes a step faster, and nor does a neighbour. The rest is as if
    what stands at 0 were known: both together, for the one moves the other.
    """
    slope, constant = mean.size + SLOPE, mean.size + CONSTANT
    if mean[slope] >= 0.0 and mean[constant] >= 0.0:
        return
    for held, other in ((slope, constant), (constant, slope)):
        if mean[held] < 0.0:
            excess = mean[held] / doubt[held, held]
            if mean[other] >= excess * doubt[other, held]:
                for row in range(mean.size):
                    mean[row] -= excess * doubt[row, held]
                mean[held] = 0.0
                # Rounding, if anything.
                mean[other] = max(mean[other], 0.0)
                return
    held, other = (slope, constant) if mean[slope] < 0.0 else (constant, slope)
    excess, share = (
        mean[held] / doubt[held, held],
        doubt[other, held] / doubt[held, held],
    )
    # What is left of the other once the one is known.
    variance = doubt[other, other] - share * doubt[other, held]
    rest = mean[other] - excess * doubt[other, held]
    rest /= max(variance, LEAST_SPREAD * doubt[other, other])
    for row in range(mean.size):
        along = doubt[row, other] - share * doubt[row, held]
        mean[row] -= excess * doubt[row, held] + rest * along
    mean[slope] = mean[constant] = 0.0


@compiled
def _makes_sense(mean: NDArray[np.float64], doubt: NDArray[np.float64]) -> bool:
    """Tell whether means are finite and in range, and no variance is below 0."""
    for index in range(mean.size):
        limit = MOST_CHANGE if index < mean.size + SLOPE else MOST_MS
        # A comparison with NaN is false.
        if not (abs(mean[index]) <= limit and 0.0 <= doubt[index, index] < np.inf):
            return False
    return True


@compiled
def _shift(
    mean: NDArray[np.float64], doubt: NDArray[np.float64], whole: float, miss: float
) -> float:
    """Follow a sudden shift, in part as a multiple and in part as a constant.

    What this count costs now is known, the parts are not: the next counts tell. A large
    shift is half of each at first. A small one, as chance makes them too, is next to
    all multiple, which no curve loses its shape by.

    Args:
        mean: As in `learn_sample`.
        doubt: Same.
        whole: The price without the level, > 0.
        miss: By how much the logarithm of the price shifted.

    Returns:
        The price without the level after the shift.
    """
    share = 0.5 * miss * min(1.0, abs(miss))
    change = whole * (math.exp(share) - 1.0)
    if mean[CONSTANT] + change < 0.0:
        change = -mean[CONSTANT]
    mean[CONSTANT] += change
    mean[0] += miss - math.log1p(change / whole)
    whole += change
    doubt[0, 0] += share**2
    doubt[CONSTANT, CONSTANT] += (share * whole) ** 2
    doubt[0, CONSTANT] -= share**2 * whole
    doubt[CONSTANT, 0] -= share**2 * whole
    return whole


@compiled
def weigh(knot_xs: NDArray[np.float64], count: float) -> tuple[int, float]:
    """Return the knot to the left of a count, and how near it is to the next one."""
    num_knots = knot_xs.size - 3
    right, share = locate(knot_xs, count)
    left = right - 1 - FIRST_KNOT
    if left < 0:
        return 0, 0.0
    if left >= num_knots - 1:
        return num_knots - 1, 0.0
    return left, share


@compiled
def apply_deviations(
    mean: NDArray[np.float64],
    doubt: NDArray[np.float64],
    knot_xs: NDArray[np.float64],
    xs: NDArray[np.float64],
    base_ys: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the prices at a curve's knots, never falling, without the level.

    Isotonic regression (pool adjacent violators): what is known well gives way the
    least.

    Returns:
        `[num_points - 3]`.
    """
    num_prices = xs.size - 3
    # Pools of neighbours: their mean price, weight, and number.
    pooled, weights = np.empty(num_prices), np.empty(num_prices)
    sizes = np.empty(num_prices, dtype=np.int64)
    num_pools = 0
    for index in range(num_prices):
        left, share = weigh(knot_xs, xs[FIRST_KNOT + index])
        right = min(left + 1, mean.size - 4)
        deviation = (1.0 - share) * mean[1 + left] + share * mean[1 + right]
        price = base_ys[FIRST_KNOT + index] * math.exp(deviation) + mean[CONSTANT]
        knot = 1 + (right if share > 0.5 else left)
        variance = doubt[0, 0] + 2.0 * doubt[0, knot] + doubt[knot, knot]
        weight, size = 1.0 / max(variance, LEAST_VARIANCE), 1
        while num_pools > 0 and pooled[num_pools - 1] > price:
            num_pools -= 1
            both = weights[num_pools] + weight
            price = (weights[num_pools] * pooled[num_pools] + weight * price) / both
            weight, size = both, size + sizes[num_pools]
        pooled[num_pools], weights[num_pools] = price, weight
        sizes[num_pools] = size
        num_pools += 1
    prices = np.empty(num_prices)
    index = 0
    for pool in range(num_pools):
        for _ in range(sizes[pool]):
            prices[index] = pooled[pool]
            index += 1
    return prices


@compiled
def _forget(doubt: NDArray[np.float64], first_doubt: NDArray[np.float64]) -> None:
    """Let some doubt return; that about the level has a pace of its own.

    What it shares with the rest shrinks as the rest does: else a covariance outgrows
    its variances.
    """
    keep = math.sqrt(1.0 - FORGET)
    for row in range(1, doubt.shape[0]):
        doubt[row, 0] *= keep
        doubt[0, row] *= keep
        for column in range(1, doubt.shape[1]):
            lost = first_doubt[row, column] - doubt[row, column]
            doubt[row, column] += FORGET * lost


@compiled
def _look_along(
    doubt: NDArray[np.float64],
    left: int,
    right: int,
    share: float,
    plain: float,
    extra: float,
    whole: float,
    noise: float,
    along: NDArray[np.float64],
) -> float:
    """Return the variance of a sample; `along` becomes its covariance with the rest."""
    # How the logarithm of a sample moves with two deviations, slope and constant.
    by_deviation, by_slope, by_constant = plain / whole, extra / whole, 1.0 / whole
    for row in range(along.size):
        between = (1.0 - share) * doubt[row, 1 + left] + share * doubt[row, 1 + right]
        along[row] = doubt[row, 0] + by_deviation * between
        along[row] += by_slope * doubt[row, SLOPE] + by_constant * doubt[row, CONSTANT]
    between = (1.0 - share) * along[1 + left] + share * along[1 + right]
    variance: float = along[0] + by_deviation * between
    variance += by_slope * along[SLOPE] + by_constant * along[CONSTANT]
    return variance + noise * noise
