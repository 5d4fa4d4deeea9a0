"""How one sample moves what is known about costs: an extended Kalman filter.

    log(sample) = level + noise
                + log(base[count] * exp(deviation[count]) + slope * context + constant)

Base costs come from the start-up profile. Level, deviations, slope and constant are
learnt together, and what is not known about them apart is known as such: a sample that
several could explain moves each by its share of the variance. Fitted one after the
other they take each other's part. While the load grows, batches and contexts grow as
one, and the cost of tokens was booked as that of context: 40 times too much of it, and
tokens all but free.

The constant is 0 until a sudden shift, which may be of either kind. A throttled clock
makes every cost a multiple. A neighbour on a core makes every parallel region wait for
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
from policies.estimators.curves import FIRST_KNOT, interpolate, locate

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL_STD, PRIOR_LEVEL_STD = 0.3, 2.0
"""Standard deviation of the level, in logarithms: of a profile, whose passes carry no
context and sample nothing, and of a prior, which knows no machine."""

SHAPE_STD, PRIOR_SHAPE_STD = 0.2, 0.5
"""The same of deviations. Those of neighbouring counts are alike: every doubling of the
count halves (by `exp(-1)`) what one says about the other."""

OWN_STD = 0.03
"""The same of what a count has to itself: kernels change their tiling there."""

CONTEXT_STD = 1e-4
"""Standard deviation of the slope, as a share of the cost of 1. A KV position is 1e-5
of the weights in a model of 8 B parameters, 1e-4 of a step of the demo target."""

LEVEL_PROCESS_NOISE = 0.3
"""By how much the level changes from sample to sample, as a share of their noise:
clocks are throttled, neighbours come and go. It is what keeps a slow spell from making
whatever counts came up in it look dear: shapes are learnt from how samples differ from
those shortly before."""

FORGET = 0.0002
"""Share of the first variance of shape and slope that returns with every sample: about
5000 are remembered. What returns must stay well below `LEVEL_PROCESS_NOISE`, or a
machine that slows down looks like a new shape at the counts of the moment, or like a
dearer context."""

FIRST_NOISE, NOISE_RANGE, NOISE_RATE = 0.1, (0.02, 0.5), 0.02
"""By how much samples scatter, at first, at least and at most, and by which share of
the way a sample moves it."""

OUTLIER = 2.5
"""Deviations beyond which a sample counts as one of so many: a page fault or a
neighbour's burst is not a new cost."""

SHIFT_SAMPLES = 2
"""Outliers in a row to the same side that are a new level after all."""


SLOPE, CONSTANT = -2, -1
"""Where these two stand, behind the level (0) and the deviations."""

LEAST_MS, MOST_MS = 1e-4, 1e7
"""What a sample can be, three hours at most. A clock that says otherwise is taken for
the nearer of the two."""

LEAST_SPREAD = 1e-9
"""Share of a variance that must be left, once something else is known, for there to be
anything to learn from it: less is rounding."""

MOST_CHANGE = 2.0 * math.log(MOST_MS / LEAST_MS)
"""Of level and deviations, in logarithms: past it a cost makes no sense."""


class NoiseState(NamedTuple):
    """What is known about the samples themselves.

    Attributes:
        noise: Standard deviation around the prediction, in logarithms.
        num_outliers: In a row, below 0 if they were too fast.
    """

    noise: float = FIRST_NOISE
    num_outliers: int = 0


def initial_covariance(
    knots: NDArray[np.float64], *, profiled: bool, context_std: float
) -> NDArray[np.float64]:
    """Return the covariance before the first sample, `[num_knots + 3, num_knots + 3]`.

    Its rows are those of `learn_sample`'s `mean`.

    Args:
        knots: `[num_knots]`, > 0, counts with a deviation.
        profiled: Base costs were measured.
        context_std: Standard deviation of the slope in milliseconds; 0 for no slope.
    """
    size = knots.size
    level, shape = LEVEL_STD, SHAPE_STD
    if not profiled:
        level, shape = PRIOR_LEVEL_STD, PRIOR_SHAPE_STD
    doublings = np.log2(knots)
    distance = np.abs(doublings[:, None] - doublings[None, :])
    covariance = np.zeros((size + 3, size + 3))
    covariance[0, 0] = level**2
    covariance[1:-2, 1:-2] = shape**2 * np.exp(-distance) + OWN_STD**2 * np.eye(size)
    covariance[SLOPE, SLOPE] = context_std**2
    return covariance


@compiled
def learn_sample(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    first_covariance: NDArray[np.float64],
    noise_state: NoiseState,
    knot_xs: NDArray[np.float64],
    xs: NDArray[np.float64],
    base_ys: NDArray[np.float64],
    count: float,
    measured_ms: float,
    num_context_tokens: float,
) -> tuple[NoiseState, bool]:
    """Learn from one sample; the first two arrays change in place.

    Args:
        mean: `[num_knots + 3]`: level, deviations, slope, constant.
        covariance: `[num_knots + 3, num_knots + 3]`, their covariance.
        first_covariance: Same shape, from `initial_covariance`.
        noise_state: Of the samples.
        knot_xs: `[num_knots + 3]`, from `curves.place_points`.
        xs: `[num_points]`, the points of the base curve.
        base_ys: `[num_points]`.
        count: Tokens or requests, > 0, as padded.
        measured_ms: What they took, > 0.
        num_context_tokens: >= 0.

    Returns:
        The clock anew, and whether what is known makes sense; if not, nothing that was
        learnt can be used any more.
    """
    size = mean.size
    measured_ms = min(max(measured_ms, LEAST_MS), MOST_MS)
    left, share = weigh(knot_xs, count)
    right = min(left + 1, size - 4)
    deviation = (1.0 - share) * mean[1 + left] + share * mean[1 + right]
    plain = interpolate(base_ys, *locate(xs, count)) * math.exp(deviation)
    whole = plain + mean[SLOPE] * num_context_tokens + mean[CONSTANT]
    _forget(covariance, first_covariance)
    covariance[0, 0] += (LEVEL_PROCESS_NOISE * noise_state.noise) ** 2
    innovation = math.log(measured_ms / whole) - mean[0]
    gain = np.empty(size)
    variance = _project(
        covariance,
        left,
        right,
        share,
        plain,
        num_context_tokens,
        whole,
        noise_state.noise,
        gain,
    )
    num_outliers = 0
    if abs(innovation) > OUTLIER * math.sqrt(variance):
        num_outliers = max(noise_state.num_outliers, 0) + 1
        if innovation < 0.0:
            num_outliers = min(noise_state.num_outliers, 0) - 1
        if abs(num_outliers) >= SHIFT_SAMPLES:
            # Everything at once, as when a core is lost: counts and context are not it.
            whole = _shift(mean, covariance, whole, innovation)
            innovation = 0.0
            variance = _project(
                covariance,
                left,
                right,
                share,
                plain,
                num_context_tokens,
                whole,
                noise_state.noise,
                gain,
            )
    limit = OUTLIER * math.sqrt(variance)
    step = min(max(innovation, -limit), limit) / variance
    for row in range(size):
        mean[row] += gain[row] * step
        for column in range(size):
            covariance[row, column] -= gain[row] * gain[column] / variance
    _keep_positive(mean, covariance)
    # The mean of a deviation's size is .8 of the standard deviation.
    scatter = 1.25 * min(abs(innovation), 4.0 * noise_state.noise)
    noise = noise_state.noise + NOISE_RATE * (scatter - noise_state.noise)
    least, most = NOISE_RANGE
    noise = min(max(noise, least), most)
    return NoiseState(noise, num_outliers), _makes_sense(mean, covariance)


@compiled
def _keep_positive(mean: NDArray[np.float64], covariance: NDArray[np.float64]) -> None:
    """Move to the likeliest state whose slope and constant are not below 0.

    More context never makes a step faster, and nor does a neighbour. The rest is as if
    what stands at 0 were known: both together, for the one moves the other.
    """
    slope, constant = mean.size + SLOPE, mean.size + CONSTANT
    if mean[slope] >= 0.0 and mean[constant] >= 0.0:
        return
    for held, other in ((slope, constant), (constant, slope)):
        if mean[held] < 0.0:
            excess = mean[held] / covariance[held, held]
            if mean[other] >= excess * covariance[other, held]:
                for row in range(mean.size):
                    mean[row] -= excess * covariance[row, held]
                mean[held] = 0.0
                # Rounding, if anything.
                mean[other] = max(mean[other], 0.0)
                return
    held, other = (slope, constant) if mean[slope] < 0.0 else (constant, slope)
    excess, share = (
        mean[held] / covariance[held, held],
        covariance[other, held] / covariance[held, held],
    )
    # What is left of the other once the one is known.
    variance = covariance[other, other] - share * covariance[other, held]
    rest = mean[other] - excess * covariance[other, held]
    rest /= max(variance, LEAST_SPREAD * covariance[other, other])
    for row in range(mean.size):
        shared = covariance[row, other] - share * covariance[row, held]
        mean[row] -= excess * covariance[row, held] + rest * shared
    mean[slope] = mean[constant] = 0.0


@compiled
def _makes_sense(mean: NDArray[np.float64], covariance: NDArray[np.float64]) -> bool:
    """Tell whether means are finite and in range, and no variance is below 0."""
    for index in range(mean.size):
        limit = MOST_CHANGE if index < mean.size + SLOPE else MOST_MS
        # A comparison with NaN is false.
        if not (abs(mean[index]) <= limit and 0.0 <= covariance[index, index] < np.inf):
            return False
    return True


@compiled
def _shift(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    whole: float,
    innovation: float,
) -> float:
    """Follow a sudden shift, in part as a multiple and in part as a constant.

    What this count costs now is known, the parts are not: the next counts tell. A large
    shift is half of each at first. A small one, as chance makes them too, is next to
    all multiple, which no curve loses its shape by.

    Args:
        mean: As in `learn_sample`.
        covariance: Same.
        whole: The cost without the level, > 0.
        innovation: By how much the logarithm of the cost shifted.

    Returns:
        The cost without the level after the shift.
    """
    share = 0.5 * innovation * min(1.0, abs(innovation))
    change = whole * (math.exp(share) - 1.0)
    if mean[CONSTANT] + change < 0.0:
        change = -mean[CONSTANT]
    mean[CONSTANT] += change
    mean[0] += innovation - math.log1p(change / whole)
    whole += change
    covariance[0, 0] += share**2
    covariance[CONSTANT, CONSTANT] += (share * whole) ** 2
    covariance[0, CONSTANT] -= share**2 * whole
    covariance[CONSTANT, 0] -= share**2 * whole
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
def _forget(
    covariance: NDArray[np.float64], first_covariance: NDArray[np.float64]
) -> None:
    """Let some variance return; that of the level has a pace of its own.

    What it shares with the rest shrinks as the rest does: else a covariance outgrows
    its variances.
    """
    keep = math.sqrt(1.0 - FORGET)
    for row in range(1, covariance.shape[0]):
        covariance[row, 0] *= keep
        covariance[0, row] *= keep
        for column in range(1, covariance.shape[1]):
            lost = first_covariance[row, column] - covariance[row, column]
            covariance[row, column] += FORGET * lost


@compiled
def _project(
    covariance: NDArray[np.float64],
    left: int,
    right: int,
    share: float,
    plain: float,
    num_context_tokens: float,
    whole: float,
    noise: float,
    gain: NDArray[np.float64],
) -> float:
    """Return a sample's variance; `gain` becomes its covariance with the state."""
    # How the logarithm of a sample moves with two deviations, slope and constant.
    by_deviation, by_slope, by_constant = (
        plain / whole,
        num_context_tokens / whole,
        1.0 / whole,
    )
    for row in range(gain.size):
        between = (1.0 - share) * covariance[row, 1 + left] + share * covariance[
            row, 1 + right
        ]
        gain[row] = covariance[row, 0] + by_deviation * between
        gain[row] += (
            by_slope * covariance[row, SLOPE] + by_constant * covariance[row, CONSTANT]
        )
    between = (1.0 - share) * gain[1 + left] + share * gain[1 + right]
    variance: float = gain[0] + by_deviation * between
    variance += by_slope * gain[SLOPE] + by_constant * gain[CONSTANT]
    return variance + noise * noise
