"""The arithmetic of calibration: predicting a batch, and a damped Newton step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from policies.compiled import compiled
from policies.estimators.logit import log_odds_of, probability_of
from policies.estimators.request_effects import learn_effects

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMORY_TOKENS = 2000.0
"""Outcomes are forgotten with this time constant, in observed draft tokens. Measured in
tokens, not steps, so that a busy engine does not forget faster than an idle one."""

NUM_CALIBRATION_BINS = 10
_LAST_BIN = NUM_CALIBRATION_BINS - 1

_INTERCEPT_PRIOR = 4.0
"""Information of the pull on each position's intercept: about 16 coin flips."""

_SLOPE_PRIOR = 8.0
"""Information of the pull on the slope."""

_MAX_STEP = 0.5
"""Largest change of a coefficient in one engine step, in log-odds: the first outcomes
after a start or a workload shift cannot throw the model off."""


@compiled
def predict_acceptance(
    confidence: NDArray[np.float64],
    intercept: NDArray[np.float64],
    slope: float,
    effect: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Do what `ConfidenceCalibration.predict` does.

    Args:
        confidence: `[num_reqs, depth]`.
        intercept: `[max_depth]`, no shorter than a draft.
        slope: Of the log-odds.
        effect: `[num_reqs]`.
    """
    num_reqs, depth = confidence.shape
    acceptance = np.empty((num_reqs, depth))
    for row in range(num_reqs):
        for position in range(depth):
            log_odds = slope * log_odds_of(confidence[row, position])
            log_odds += intercept[position] + effect[row]
            acceptance[row, position] = probability_of(log_odds)
    return acceptance


@compiled
def find_impossible(
    confidence: NDArray[np.float64],
    num_verified: NDArray[np.int64],
    num_accepted: NDArray[np.int64],
) -> int:
    """Return the first row that nothing can be learnt from; -1 if there is none.

    Args:
        confidence: `[num_reqs, depth]`; looked at where it was observed.
        num_verified: `[num_reqs]`.
        num_accepted: `[num_reqs]`.
    """
    depth = confidence.shape[1]
    for row in range(num_verified.size):
        if not 0 <= num_accepted[row] <= num_verified[row]:
            return row
        for position in range(min(num_verified[row], num_accepted[row] + 1, depth)):
            # Nothing compares with NaN.
            if not 0.0 <= confidence[row, position] <= 1.0:
                return row
    return -1


@compiled
def learn_outcomes(
    confidence: NDArray[np.float64],
    slots: NDArray[np.int64],
    num_verified: NDArray[np.int64],
    num_accepted: NDArray[np.int64],
    intercept: NDArray[np.float64],
    slope: float,
    info_intercept: NDArray[np.float64],
    info_cross: NDArray[np.float64],
    info_slope: float,
    prior: tuple[float, float],
    gradient: NDArray[np.float64],
    information: NDArray[np.float64],
    effect: NDArray[np.float64],
    bins: NDArray[np.float64],
) -> tuple[float, float]:
    """Learn from one step's outcomes: arrays in place, slopes as what is returned.

    Positions behind a rejection were not observed; see `acceptance.split_observed`.
    """
    depth = confidence.shape[1]
    num_tokens = 0
    for row in range(slots.size):
        num_tokens += max(0, min(num_verified[row], num_accepted[row] + 1, depth))
    if num_tokens == 0:
        return slope, info_slope
    keep = math.exp(-num_tokens / MEMORY_TOKENS)
    info_slope *= keep
    for position in range(intercept.size):
        info_intercept[position] *= keep
        info_cross[position] *= keep
    for place in range(NUM_CALIBRATION_BINS):
        for kind in range(3):
            bins[kind, place] *= keep
    residuals = np.empty(num_tokens)
    weights = np.empty(num_tokens)
    owners = np.empty(num_tokens, np.int64)
    step = np.zeros(intercept.size)
    step_slope = 0.0
    token = 0
    for row in range(slots.size):
        for position in range(min(num_verified[row], num_accepted[row] + 1, depth)):
            feature = log_odds_of(confidence[row, position])
            log_odds = slope * feature + intercept[position] + effect[slots[row]]
            probability = probability_of(log_odds)
            outcome = 1.0 if position < num_accepted[row] else 0.0
            place = min(int(probability * NUM_CALIBRATION_BINS), _LAST_BIN)
            bins[0, place] += 1.0
            bins[1, place] += probability
            bins[2, place] += outcome
            residual, weight = outcome - probability, probability * (1.0 - probability)
            info_intercept[position] += weight
            info_cross[position] += weight * feature
            info_slope += weight * feature * feature
            step[position] += residual
            step_slope += residual * feature
            owners[token] = slots[row]
            residuals[token], weights[token] = residual, weight
            token += 1
    learn_effects(owners, residuals, weights, gradient, information, effect)
    slope = _move(
        intercept,
        slope,
        step,
        step_slope,
        info_intercept,
        info_cross,
        info_slope,
        prior,
        1.0 - keep,
    )
    return slope, info_slope


@compiled
def _move(
    intercept: NDArray[np.float64],
    slope: float,
    gradient: NDArray[np.float64],
    gradient_slope: float,
    info_intercept: NDArray[np.float64],
    info_cross: NDArray[np.float64],
    info_slope: float,
    prior: tuple[float, float],
    forgotten: float,
) -> float:
    """Take a damped Newton step: intercepts in place, the slope as what is returned.

    Priors pull intercepts towards their common level, the slope towards its start.
    """
    prior_intercept, prior_slope = prior
    level = _INTERCEPT_PRIOR * prior_intercept
    known = _INTERCEPT_PRIOR
    for position in range(intercept.size):
        level += info_intercept[position] * intercept[position]
        known += info_intercept[position]
    level /= known
    curvature = info_slope + _SLOPE_PRIOR
    rest = gradient_slope + forgotten * _SLOPE_PRIOR * (prior_slope - slope)
    for position in range(intercept.size):
        pull = forgotten * _INTERCEPT_PRIOR * (level - intercept[position])
        gradient[position] += pull
        ratio = info_cross[position] / (info_intercept[position] + _INTERCEPT_PRIOR)
        curvature -= ratio * info_cross[position]
        rest -= ratio * gradient[position]
    step_slope = min(max(rest / max(curvature, 1e-6), -_MAX_STEP), _MAX_STEP)
    for position in range(intercept.size):
        step = gradient[position] - info_cross[position] * step_slope
        step /= info_intercept[position] + _INTERCEPT_PRIOR
        intercept[position] += min(max(step, -_MAX_STEP), _MAX_STEP)
    return max(0.0, slope + step_slope)
