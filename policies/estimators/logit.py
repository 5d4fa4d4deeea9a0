"""Probabilities and their log-odds, of arrays and of single numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_LOG_ODDS = 8.0
"""Confidence is clipped to log-odds of +-8 (3e-4 from 0 and 1): past that the softmax
of a bf16 model says nothing more about acceptance."""

LEAST_PROBABILITY = float(1.0 / (1.0 + np.exp(MAX_LOG_ODDS)))
"""Probability at the smallest log-odds."""


def to_log_odds(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-odds of probabilities of any shape, within +-`MAX_LOG_ODDS`."""
    # Plain ufuncs: np.clip takes longer than all the rest on a batch's few numbers.
    clipped = np.minimum(
        np.maximum(probability, LEAST_PROBABILITY), 1.0 - LEAST_PROBABILITY
    )
    log_odds: NDArray[np.float64] = np.log(clipped / (1.0 - clipped))
    return log_odds


def to_probability(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities of log-odds of any shape."""
    probability: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-log_odds))
    return probability


@compiled
def log_odds_of(probability: float) -> float:
    """Do what `to_log_odds` does, for one number in a compiled loop."""
    clipped = min(max(probability, LEAST_PROBABILITY), 1.0 - LEAST_PROBABILITY)
    return math.log(clipped / (1.0 - clipped))


@compiled
def probability_of(log_odds: float) -> float:
    """Do what `to_probability` does, for one number in a compiled loop."""
    return 1.0 / (1.0 + math.exp(-log_odds))
