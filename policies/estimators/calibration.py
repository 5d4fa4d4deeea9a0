"""Online calibration from drafter confidence to acceptance probability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.estimators.calibration_fit import (
    NUM_CALIBRATION_BINS,
    find_impossible,
    learn_outcomes,
    predict_acceptance,
)
from policies.estimators.logit import MAX_LOG_ODDS, to_probability
from policies.estimators.request_effects import RequestEffects
from policies.estimators.state import read_array, read_number
from policies.types import AcceptanceScale

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

MOST_LOG_ODDS, MOST_INFORMATION = 100.0, 1e6
"""Of coefficients that were learnt, and of what is remembered about them: a tenth of
the one and a twentieth of the other is out of reach."""

AGED_KEEP = 0.8
"""What is kept of the evidence each time that drafts are verified only to see whether
it still holds: against all of it, their few outcomes would weigh nothing."""


@dataclass(slots=True)
class ConfidenceCalibration:
    """Logistic regression on the log-odds of the most likely draft token, online.

        log-odds(accept at j of request i)
            = intercept_j + slope * log-odds(confidence_ij) + effect_i

    One damped Newton step per engine step on exponentially forgotten statistics. The
    information matrix is an arrow (positions couple only through the slope), so the
    step is solved in closed form. Positions that were rarely observed are pulled
    towards the mean of the others; a request's effect is pulled towards 0.

    Starts from intercept `prior_intercept` and slope `prior_slope`, slightly below the
    drafter's own word: drafters are overconfident, and an optimistic start would
    verify too much.

    Everything it predicts from is known before the position's token is drawn, so
    selecting by it stays lossless.

    Source: vLLM 0.32's acceptance estimator uses the same feature; positions, request
    effects and the arrow-shaped online step are ours.
    """

    max_depth: int
    prior_intercept: float = -0.3
    prior_slope: float = 0.8
    _intercept: NDArray[np.float64] = field(init=False)
    _slope: float = field(init=False)
    _info_intercept: NDArray[np.float64] = field(init=False)
    _info_cross: NDArray[np.float64] = field(init=False)
    _info_slope: float = field(init=False, default=0.0)
    _requests: RequestEffects = field(init=False, default_factory=RequestEffects)
    _bins: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Start from the prior."""
        if self.max_depth < 1:
            raise ValueError(f"max_depth must be >= 1, got {self.max_depth}")
        self._intercept = np.full(self.max_depth, self.prior_intercept)
        self._slope = self.prior_slope
        self._info_intercept = np.zeros(self.max_depth)
        self._info_cross = np.zeros(self.max_depth)
        self._bins = np.zeros((3, NUM_CALIBRATION_BINS))

    def predict(
        self, confidence: NDArray[np.float64], req_ids: Sequence[Hashable]
    ) -> NDArray[np.float64]:
        """Return acceptance probabilities given that everything before was accepted.

        Args:
            confidence: `[num_reqs, depth]`, 0-1, depth <= `max_depth`.
            req_ids: `[num_reqs]`. Unknown requests have no effect of their own.

        Returns:
            `[num_reqs, depth]`, float64, strictly between 0 and 1.

        Raises:
            ValueError: If shapes disagree.
        """
        self._check(confidence, len(req_ids))
        return predict_acceptance(
            np.ascontiguousarray(confidence, dtype=np.float64),
            self._intercept,
            self._slope,
            self._requests.log_odds(req_ids),
        )

    def observe(
        self,
        confidence: NDArray[np.float64],
        req_ids: Sequence[Hashable],
        num_verified: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> None:
        """Learn from one step's outcomes.

        Args:
            confidence: `[num_reqs, depth]`, 0-1, as it was when the drafts were
                selected. Positions that were not observed may hold anything.
            req_ids: `[num_reqs]`.
            num_verified: `[num_reqs]`, >= 0; positions past the depth teach nothing.
            num_accepted: `[num_reqs]`, 0..`num_verified`.

        Raises:
            ValueError: If shapes disagree, an observed confidence is no probability or
                an outcome cannot have happened. Nothing is learnt then: a single NaN
                would stay in every coefficient for good.
        """
        self._check(confidence, len(req_ids))
        if not num_verified.size == num_accepted.size == len(req_ids):
            raise ValueError(
                f"{num_verified.size} and {num_accepted.size} outcomes of "
                f"{len(req_ids)} requests"
            )
        confidence = np.ascontiguousarray(confidence, dtype=np.float64)
        num_verified = np.ascontiguousarray(num_verified, dtype=np.int64)
        num_accepted = np.ascontiguousarray(num_accepted, dtype=np.int64)
        row = find_impossible(confidence, num_verified, num_accepted)
        if row >= 0:
            raise ValueError(
                f"row {row}: {num_accepted[row]} of {num_verified[row]} drafts "
                f"accepted at confidences {confidence[row].tolist()}; needed are "
                "0 <= accepted <= verified and confidences within 0-1"
            )
        requests = self._requests
        slots = requests.assign_slots(req_ids, (num_verified > 0).tolist())
        self._slope, self._info_slope = learn_outcomes(
            confidence,
            slots,
            num_verified,
            num_accepted,
            self._intercept,
            self._slope,
            self._info_intercept,
            self._info_cross,
            self._info_slope,
            (self.prior_intercept, self.prior_slope),
            requests.gradient,
            requests.information,
            requests.effect,
            self._bins,
        )

    def age(self) -> None:
        """Trust what was learnt a little less: hardly anything is verified."""
        self._info_intercept *= AGED_KEEP
        self._info_cross *= AGED_KEEP
        self._info_slope *= AGED_KEEP

    def scale(self, req_ids: Sequence[Hashable]) -> AcceptanceScale:
        """Return what `predict` computes with, for these requests."""
        return AcceptanceScale(
            slope=self._slope,
            intercept=self._intercept.copy(),
            effect=self._requests.log_odds(req_ids),
            max_log_odds=MAX_LOG_ODDS,
        )

    def forget(self, req_id: Hashable) -> None:
        """Drop a finished request's effect."""
        self._requests.forget(req_id)

    def calibration_error(self) -> float | None:
        """Return the expected calibration error, 0-1; None before any outcome.

        Predictions made before learning from their outcome, in ten equal bins, with
        the same forgetting as the model itself.
        """
        count, predicted, happened = self._bins
        total = count.sum()
        if total == 0:
            return None
        return float(np.abs(predicted - happened).sum() / total)

    def mean_acceptance(self, depth: int) -> NDArray[np.float64]:
        """Return the acceptance at log-odds of 1, a confidence of .73, `[depth]`.

        Stands for drafts while hardly any were made: less than most of them have.
        """
        return to_probability(self._intercept[:depth] + self._slope)

    def export_state(self) -> dict[str, Any]:
        """Return what was learnt about the model pair, without requests."""
        return {
            "intercept": self._intercept.tolist(),
            "slope": self._slope,
            "info_intercept": self._info_intercept.tolist(),
            "info_cross": self._info_cross.tolist(),
            "info_slope": self._info_slope,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Start from another engine's `export_state`.

        Raises:
            ValueError: If it was learnt at another depth, or cannot be true; nothing
                has changed then.
        """
        depth, most = self.max_depth, MOST_INFORMATION
        intercept = read_array(
            state, "intercept", size=depth, least=-MOST_LOG_ODDS, most=MOST_LOG_ODDS
        )
        slope = read_number(state, "slope", most=MOST_LOG_ODDS)
        info_intercept = read_array(state, "info_intercept", size=depth, most=most)
        info_cross = read_array(state, "info_cross", size=depth, least=-most, most=most)
        info_slope = read_number(state, "info_slope", most=most)
        if (info_cross**2 > (1.0 + 1e-6) * info_intercept * info_slope).any():
            raise ValueError(
                "state's 'info_cross' is more than 'info_intercept' and 'info_slope' "
                "allow: no outcomes have such moments"
            )
        self._intercept, self._slope = intercept, slope
        self._info_intercept, self._info_cross = info_intercept, info_cross
        self._info_slope = info_slope

    def _check(self, confidence: NDArray[np.float64], num_reqs: int) -> None:
        """Refuse what a compiled loop would read past the end of."""
        if confidence.shape[0] != num_reqs or confidence.shape[1] > self.max_depth:
            raise ValueError(
                f"confidence {confidence.shape} must hold a row for each of {num_reqs} "
                f"requests and at most {self.max_depth} positions"
            )
