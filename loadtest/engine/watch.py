"""Who stands between engine and planner, and what passes there."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.estimators.acceptance import split_observed
from policies.estimators.logit import to_log_odds, to_probability

from .outcome_bins import Array, OutcomeBins, sum_outcomes


@dataclass(slots=True)
class WatchedStep:
    """One engine step, in the planner's own values.

    Attributes:
        batch: Drafts that were offered; None if there were none.
        selection: What was admitted of them.
        depth: To which it drafts afterwards, as chosen.
        outcome: What was accepted; None if nothing was verified.
        scale: Of acceptance, by which these drafts were selected; None from a planner
            that predicts none.
        timing: What it cost; None where it was not timed.
        predicted_ms: What it should have, before anything was learnt from it.
    """

    batch: Any = None
    selection: Any = None
    depth: int | None = None
    outcome: Any = None
    scale: Any = None
    timing: Any = None
    predicted_ms: float | None = None

    def predict(self) -> tuple[Array, Array] | None:
        """Return what the drafter and the planner thought of the verified drafts.

        Returns:
            Confidence and calibrated probability, both `[num_outcomes, max_depth]`, in
            the order of the outcome, NaN for drafts that were not offered; None where
            one of them is not known.
        """
        if self.outcome is None or self.scale is None:
            return None
        confidence = self.outcome.confidence
        if confidence is None:
            if self.batch is None or self.batch.confidence is None:
                return None
            rows = {req_id: row for row, req_id in enumerate(self.batch.req_ids)}
            found = np.array([rows.get(req_id, -1) for req_id in self.outcome.req_ids])
            confidence = np.where(
                (found >= 0)[:, None], self.batch.confidence[found], np.nan
            )
        confidence = confidence[:, : self.scale.intercept.size]
        log_odds = self.scale.slope * to_log_odds(confidence)
        log_odds = log_odds + self.scale.intercept[: confidence.shape[1]]
        return confidence, to_probability(log_odds + self.scale.effect[:, None])


class Watch:
    """Stands between engine and planner, passes everything on, and keeps all of it.

    By reference, which costs a microsecond or two a step that the arm pays itself; all
    arithmetic waits for the end.
    """

    def __init__(self, planner: Any) -> None:
        """Watch a planner."""
        self._planner = planner
        self.start_over()

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self._planner, name)

    def start_over(self) -> None:
        """Forget the steps so far."""
        self._steps = [WatchedStep()]
        self._marks: dict[str, int] = {}

    def mark(self, name: str) -> None:
        """Note that `start` or `end` of the steady part has been reached."""
        self._marks[name] = len(self._steps) - 1

    @property
    def steps(self) -> list[WatchedStep]:
        """All finished steps."""
        return self._steps[:-1]

    @property
    def window(self) -> tuple[int, int]:
        """Steps before the steady part, and before its end."""
        return self._marks.get("start", 0), self._marks.get("end", len(self.steps))

    def select(self, batch: Any) -> Any:
        """Note the drafts offered and admitted."""
        selection = self._planner.select(batch)
        self._steps[-1].batch, self._steps[-1].selection = batch, selection
        return selection

    def choose_depth(self, *args: Any, **kwargs: Any) -> int:
        """Note the depth."""
        depth = self._steps[-1].depth = int(self._planner.choose_depth(*args, **kwargs))
        return depth

    def observe(self, outcome: Any) -> None:
        """Note what was accepted; the step ends here."""
        if len(outcome.req_ids):
            self._steps[-1].outcome = outcome
            self._steps[-1].scale = self._planner.acceptance_scale(outcome.req_ids)
        self._planner.observe(outcome)
        self._steps.append(WatchedStep())

    def observe_timing(self, timing: Any) -> None:
        """Note what the step before cost, and was predicted to cost."""
        if len(self._steps) > 1:
            self._steps[-2].timing = timing
            predict = getattr(getattr(self._planner, "cost", None), "predict_ms", None)
            if predict is not None:
                self._steps[-2].predicted_ms = float(predict(timing))
        self._planner.observe_timing(timing)

    def step_time_error(self) -> float | None:
        """Return the median relative error in the steady part; None without one.

        As a mean it would be that of the few steps that a busy machine made slow.
        """
        errors = [
            abs(step.predicted_ms - step.timing.total_ms) / step.timing.total_ms
            for step in self._steady()
            if step.predicted_ms is not None and step.timing.total_ms > 0
        ]
        return statistics.median(errors) if errors else None

    def acceptance_bins(self) -> dict[str, OutcomeBins]:
        """Return predictions of verified drafts in the steady part, with outcomes.

        Returns:
            `calibration_bins` of calibrated probabilities, `confidence_bins` of what
            the drafter said; {} where nothing was predicted.
        """
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for step in self._steady():
            predicted = step.predict()
            if predicted is None:
                continue
            observed, accepted = split_observed(
                step.outcome.num_verified,
                step.outcome.num_accepted,
                predicted[0].shape[1],
            )
            observed &= ~np.isnan(predicted[0])
            happened = accepted[observed].astype(np.float64)
            names = ("confidence_bins", "calibration_bins")
            for name, one in zip(names, predicted, strict=True):
                pairs.setdefault(name, []).append((one[observed], happened))
        return {
            name: sum_outcomes(*map(np.concatenate, zip(*own, strict=True)))
            for name, own in pairs.items()
        }

    def _steady(self) -> list[WatchedStep]:
        return self.steps[slice(*self.window)]
