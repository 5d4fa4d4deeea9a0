"""Costs at a curve's knots that never fall, from what the filter knows of them."""

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
"""Of a cost, in logarithms: below it two are known equally well."""


@compiled
def apply_deviations(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    knot_xs: NDArray[np.float64],
    xs: NDArray[np.float64],
    base_ys: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the costs at a curve's knots, never falling, without the level.

    Isotonic regression (pool adjacent violators): what is known well gives way the
    least.

    Returns:
        `[num_points - 3]`.
    """
    num_costs = xs.size - 3
    # Pools of neighbours: their mean cost, weight, and number.
    pooled, weights = np.empty(num_costs), np.empty(num_costs)
    sizes = np.empty(num_costs, dtype=np.int64)
    num_pools = 0
    for index in range(num_costs):
        left, share = weigh(knot_xs, xs[FIRST_KNOT + index])
        right = min(left + 1, mean.size - 4)
        deviation = (1.0 - share) * mean[1 + left] + share * mean[1 + right]
        cost_ms = base_ys[FIRST_KNOT + index] * math.exp(deviation) + mean[CONSTANT]
        knot = 1 + (right if share > 0.5 else left)
        variance = covariance[0, 0] + 2.0 * covariance[0, knot] + covariance[knot, knot]
        weight, size = 1.0 / max(variance, LEAST_VARIANCE), 1
        while num_pools > 0 and pooled[num_pools - 1] > cost_ms:
            num_pools -= 1
            both = weights[num_pools] + weight
            cost_ms = (weights[num_pools] * pooled[num_pools] + weight * cost_ms) / both
            weight, size = both, size + sizes[num_pools]
        pooled[num_pools], weights[num_pools] = cost_ms, weight
        sizes[num_pools] = size
        num_pools += 1
    costs_ms = np.empty(num_costs)
    index = 0
    for pool in range(num_pools):
        for _ in range(sizes[pool]):
            costs_ms[index] = pooled[pool]
            index += 1
    return costs_ms
