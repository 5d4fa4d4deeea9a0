"""Calibration fitted to all outcomes of a trace at once: nothing is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.estimators.acceptance import split_observed
from policies.estimators.calibration import ConfidenceCalibration
from policies.estimators.logit import to_log_odds, to_probability
from policies.estimators.request_effects import PRIOR_TOKENS

from .replay import ReplayStep
from .traces import Array

PRIOR_INFORMATION = 4.0
"""Pull of every shared coefficient towards its start, about 16 coin flips. It matters
for depths that were hardly ever tried, and where everything was accepted."""

MAX_NEWTON_STEPS = 50
MAX_HALVINGS = 20
_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True)
class OfflineFit:
    """Coefficients of the model that `ConfidenceCalibration` learns online.

    Attributes:
        intercept: `[max_depth]`.
        slope: >= 0.
        effects: By request, shrunk towards 0 as online.
    """

    intercept: Array
    slope: float
    effects: dict[int, float]


@dataclass(frozen=True, slots=True)
class _Regression:
    """Penalised logistic regression.

    Attributes:
        design: `[num_outcomes, num_coefficients]`.
        happened: `[num_outcomes]`, 0 or 1.
        start: `[num_coefficients]`, what coefficients are pulled towards.
        pull: `[num_coefficients]`, > 0, information of that pull.
    """

    design: Array
    happened: Array
    start: Array
    pull: Array

    def solve(self) -> Array:
        """Return the coefficients, by Newton steps that never make it worse."""
        found = self.start.copy()
        loss = self.loss(found)
        for _ in range(MAX_NEWTON_STEPS):
            step = self._newton_step(found)
            for _ in range(MAX_HALVINGS):
                if (new_loss := self.loss(found + step)) <= loss:
                    break
                step = step / 2
            else:
                break
            found, is_done = found + step, loss - new_loss <= _TOLERANCE
            loss = new_loss
            if is_done:
                break
        return found

    def loss(self, found: Array) -> float:
        """Return the negative log-likelihood with the penalty."""
        log_odds = self.design @ found
        surprise = np.logaddexp(0.0, log_odds) - self.happened * log_odds
        penalty = 0.5 * self.pull @ (found - self.start) ** 2
        return float(surprise.sum() + penalty)

    def _newton_step(self, found: Array) -> Array:
        probability = to_probability(self.design @ found)
        gradient = self.design.T @ (self.happened - probability)
        gradient -= self.pull * (found - self.start)
        weight = probability * (1.0 - probability)
        information = self.design.T @ (self.design * weight[:, None])
        step = np.linalg.solve(information + np.diag(self.pull), gradient)
        return np.asarray(step, dtype=np.float64)


def fit_offline(steps: Sequence[ReplayStep], max_depth: int) -> OfflineFit:
    """Fit intercepts, slope and effects of requests to all outcomes of some steps.

        log-odds(accept at j of request i)
            = level + deviation_j + slope * log-odds(confidence_ij) + effect_i

    Every outcome counts the same, early or late. Deviations are pulled towards 0, so
    that a depth that was hardly tried has the intercept of the others.
    """
    prior = ConfidenceCalibration(max_depth)
    req_ids = sorted({req_id for step in steps for req_id in step.req_ids})
    found = _regress(steps, max_depth, req_ids, prior).solve()
    deviation, effects = np.split(found[2:], [max_depth])
    return OfflineFit(
        intercept=found[0] + deviation,
        slope=max(0.0, float(found[1])),
        effects=dict(zip(req_ids, effects.tolist(), strict=True)),
    )


def _regress(
    steps: Sequence[ReplayStep],
    max_depth: int,
    req_ids: Sequence[int],
    prior: ConfidenceCalibration,
) -> _Regression:
    """Set up the regression: level, slope, `max_depth` deviations, then effects."""
    feature, position, req, happened = _read_outcomes(steps)
    first_effect = 2 + max_depth
    design = np.zeros((feature.size, first_effect + len(req_ids)))
    outcome = np.arange(feature.size)
    design[:, 0] = 1.0
    design[:, 1] = feature
    design[outcome, 2 + position.astype(np.int64)] = 1.0
    design[outcome, first_effect + np.searchsorted(req_ids, req)] = 1.0
    start = np.zeros(design.shape[1])
    start[:2] = prior.prior_intercept, prior.prior_slope
    pull = np.full(design.shape[1], PRIOR_INFORMATION)
    # An observed token of p = 1/2 carries 1/4.
    pull[first_effect:] = PRIOR_TOKENS / 4
    return _Regression(design, happened, start, pull)


def _read_outcomes(steps: Sequence[ReplayStep]) -> tuple[Array, ...]:
    """Return log-odds of confidence, position, request and outcome of every token."""
    parts: list[tuple[Array, ...]] = [(np.empty(0),) * 4]
    for step in steps:
        observed, accepted = split_observed(
            step.num_offered, step.num_accepted, step.confidence.shape[1]
        )
        row, position = np.nonzero(observed)
        parts.append(
            (
                to_log_odds(step.confidence[row, position]),
                position.astype(np.float64),
                np.asarray(step.req_ids, dtype=np.float64)[row],
                accepted[row, position].astype(np.float64),
            )
        )
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))
