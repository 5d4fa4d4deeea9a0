"""Predicted against observed acceptance, in ten bins of equal width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_BINS = 10

_SUMS = ("count", "predicted", "happened", "variance")


@dataclass(frozen=True, slots=True)
class CalibrationCurve:
    """Predicted against observed acceptance, by bin.

    Attributes:
        predicted: `[num_bins]`, mean prediction; empty bins are left out.
        observed: `[num_bins]`, share accepted.
        count: `[num_bins]`.
        error: Expected calibration error, 0-1.
        exact_error: What the error of exact predictions would be on average, over as
            many outcomes: chance alone keeps bins from agreeing.
    """

    predicted: Array
    observed: Array
    count: Array
    error: float
    exact_error: float


@dataclass(frozen=True, slots=True)
class OutcomeBins:
    """Sums over outcomes, which add up over rounds; each `[NUM_BINS]`.

    Attributes:
        count: Outcomes.
        predicted: Their predictions, 0-1.
        happened: How many were accepted.
        variance: p (1 - p) of the predictions.
    """

    count: Array
    predicted: Array
    happened: Array
    variance: Array

    def as_dict(self) -> dict[str, list[float]]:
        """Return plain values."""
        return {name: getattr(self, name).tolist() for name in _SUMS}

    def curve(self) -> CalibrationCurve | None:
        """Return the curve; None without any outcome."""
        filled = self.count > 0
        if not filled.any():
            return None
        count = self.count[filled]
        predicted, observed = self.predicted[filled] / count, self.happened[filled]
        observed = observed / count
        error = float(np.abs(predicted - observed) @ count / count.sum())
        # The mean of |x| of a normal x is its deviation times sqrt(2 / pi).
        exact_error = np.sqrt(self.variance * 2.0 / np.pi).sum() / count.sum()
        return CalibrationCurve(predicted, observed, count, error, float(exact_error))


def sum_outcomes(probability: Array, happened: Array) -> OutcomeBins:
    """Sort predictions with their outcomes into bins.

    Args:
        probability: `[num_outcomes]`, 0-1.
        happened: `[num_outcomes]`, 0 or 1.
    """
    bins = np.minimum((probability * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return OutcomeBins(
        count=_sum_by_bin(bins, np.ones_like(probability)),
        predicted=_sum_by_bin(bins, probability),
        happened=_sum_by_bin(bins, happened),
        variance=_sum_by_bin(bins, probability * (1.0 - probability)),
    )


def _sum_by_bin(bins: NDArray[np.int64], values: Array) -> Array:
    return np.bincount(bins, values, NUM_BINS).astype(np.float64)


def add_up_bins(bins: Sequence[Mapping[str, Any]]) -> OutcomeBins:
    """Add up what `as_dict` returned, of at least one."""
    return OutcomeBins(
        *(np.sum([one[name] for one in bins], axis=0, dtype=float) for name in _SUMS)
    )
