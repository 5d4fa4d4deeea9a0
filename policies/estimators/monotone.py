"""Prices at a curve's knots that never fall, from what the filter knows of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled
from policies.estimators.cost_filter import CONSTANT, weigh
from policies.estimators.curves import FIRST_KNOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_VARIANCE = 1e-6
"""Of a price, in logarithms: below it two are known equally well."""


@compiled
def apply_deviations(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
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
        variance = covariance[0, 0] + 2.0 * covariance[0, knot] + covariance[knot, knot]
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
