"""How far a planner's predictions of acceptance were off, in the steady part alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from policies.estimators.acceptance import split_observed
from policies.estimators.logit import to_log_odds, to_probability
from policies.types import AcceptanceScale

from .outcome_bins import Array, OutcomeBins, sum_outcomes


class _Note(NamedTuple):
    """One step's outcome, and what its predictions were made of."""

    batch: Any
    outcome: Any
    scale: AcceptanceScale


class AcceptanceErrors:
    """Stands between scheduler and planner and compares predictions with outcomes.

    A prediction is that of the planner's calibration before it has learnt from the
    step: the one by which the step's drafts were selected. The planner's own gauge
    would not do: it forgets too slowly to be about one cell.

    Of every step no more is kept than what predictions were made of, which costs
    microseconds that the arm pays itself; all else waits for the end.
    """

    def __init__(self, planner: Any) -> None:
        """Watch a planner that has a calibration."""
        self._planner = planner
        self._batch: Any = None
        self._is_steady = False
        self._notes: list[_Note] = []

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the planner has."""
        return getattr(self._planner, name)

    def mark(self, name: str) -> None:
        """Note that `start` or `end` of the steady part has been reached."""
        self._is_steady = name == "start"

    def select(self, batch: Any) -> Any:
        """Remember the drafts that are offered."""
        self._batch = batch
        return self._planner.select(batch)

    def observe(self, outcome: Any) -> None:
        """Note what was accepted, and by which calibration it was predicted."""
        batch, self._batch = self._batch, None
        if self._is_steady and len(outcome.req_ids):
            scale = self._planner.acceptance_scale(outcome.req_ids)
            self._notes.append(_Note(batch, outcome, scale))
        self._planner.observe(outcome)

    def bins(self) -> OutcomeBins:
        """Return predictions with what happened, of the steady part."""
        pairs = [pair for note in self._notes for pair in [_read(note)] if pair]
        probability, happened = (
            np.concatenate([np.empty(0), *(pair[part] for pair in pairs)])
            for part in (0, 1)
        )
        return sum_outcomes(probability, happened)


def _read(note: _Note) -> tuple[Array, Array] | None:
    """Return probabilities and outcomes; None where drafts came without confidence."""
    outcome, scale = note.outcome, note.scale
    rows = np.arange(len(outcome.req_ids))
    confidence = outcome.confidence
    if confidence is None:
        if note.batch is None or note.batch.confidence is None:
            return None
        row_of = {req_id: row for row, req_id in enumerate(note.batch.req_ids)}
        rows = np.array([row_of.get(req_id, -1) for req_id in outcome.req_ids])
        confidence = note.batch.confidence[rows]
    confidence = confidence[:, : scale.intercept.size]
    depth = confidence.shape[1]
    log_odds = scale.slope * to_log_odds(confidence) + scale.intercept[:depth]
    probability = to_probability(log_odds + scale.effect[:, None])
    observed, accepted = split_observed(
        outcome.num_verified, outcome.num_accepted, depth
    )
    observed &= (rows >= 0)[:, None]
    return probability[observed], accepted[observed].astype(np.float64)


@contextmanager
def watch_acceptance(scheduler: Any) -> Iterator[AcceptanceErrors | None]:
    """Watch a scheduler's planner.

    Yields:
        The record; None where no acceptance is predicted.
    """
    planner = getattr(scheduler, "_planner", None)
    if planner is None or planner.acceptance_scale(()) is None:
        yield None
        return
    errors = AcceptanceErrors(planner)
    scheduler._planner = errors
    try:
        yield errors
    finally:
        scheduler._planner = planner
