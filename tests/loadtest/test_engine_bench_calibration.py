"""Calibration of one cell: predictions of its steady part, beside what happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadtest.engine_bench.acceptance_errors import AcceptanceErrors, watch_acceptance
from loadtest.engine_bench.arms import parse_arm
from loadtest.engine_bench.outcome_bins import add_up_bins, bin_outcomes, sum_outcomes
from loadtest.engine_bench.rows import make_rows
from policies.baselines import FixedPlanner
from policies.estimators.calibration import ConfidenceCalibration
from policies.goodput import GoodputPlanner
from policies.types import DraftBatch, EngineLimits, VerificationOutcome
from tests.loadtest.test_engine_bench import CELL, measured

DEPTH = 3


def run_steps(planner: Any, num_steps: int, *, num_accepted: int) -> None:
    """Offer and verify the drafts of two requests, so many of each one right."""
    for _ in range(num_steps):
        planner.select(
            DraftBatch(
                num_draft_tokens=np.full(2, DEPTH),
                confidence=np.full((2, DEPTH), 0.8),
                req_ids=("a", "b"),
                num_decodes=2,
            )
        )
        planner.observe(
            VerificationOutcome(
                num_verified=np.full(2, DEPTH),
                num_accepted=np.full(2, num_accepted),
                req_ids=("a", "b"),
            )
        )


def test_the_error_is_that_of_the_steady_part_alone() -> None:
    planner = GoodputPlanner.build(DEPTH, EngineLimits())
    scheduler = SimpleNamespace(_planner=planner)
    # What the cell before and this one's ramp leave behind is in the planner's gauge.
    run_steps(planner, 50, num_accepted=0)
    with watch_acceptance(scheduler) as errors:
        assert errors is not None
        run_steps(scheduler._planner, 10, num_accepted=0)
        errors.mark("start")
        run_steps(scheduler._planner, 7, num_accepted=DEPTH)
        errors.mark("end")
        run_steps(scheduler._planner, 5, num_accepted=0)
    bins = errors.bins()

    assert scheduler._planner is planner
    assert bins.count.sum() == bins.happened.sum() == 7 * 2 * DEPTH
    curve = bins.curve()
    assert curve is not None
    assert curve.error == pytest.approx(1.0 - bins.predicted.sum() / bins.count.sum())


def make_stub(calibration: ConfidenceCalibration, observe: Any = None) -> Any:
    return SimpleNamespace(
        acceptance_scale=calibration.scale,
        select=lambda batch: None,
        observe=observe or (lambda outcome: None),
    )


def test_a_prediction_is_what_the_draft_was_selected_by() -> None:
    """Before the planner learns from the step, and with the request's own effect."""
    confidence = np.array([[0.9, 0.6, 0.3], [0.5, 0.4, 0.2]])
    # The outcome is not in the order of the drafts.
    outcome = VerificationOutcome(
        num_verified=np.array([1, 3]),
        num_accepted=np.array([0, 1]),
        req_ids=("b", "a"),
    )
    calibration = ConfidenceCalibration(DEPTH)

    def learn(outcome: VerificationOutcome) -> None:
        counts = outcome.num_verified, outcome.num_accepted
        calibration.observe(confidence[::-1], outcome.req_ids, *counts)

    errors = AcceptanceErrors(make_stub(calibration, learn))
    errors.mark("start")
    expected: list[float] = []
    for _ in range(5):
        predicted = calibration.predict(confidence, ("a", "b"))
        expected += [predicted[1, 0], *predicted[0, :2]]
        errors.select(SimpleNamespace(confidence=confidence, req_ids=("a", "b")))
        errors.observe(outcome)
    bins = errors.bins()

    exact = sum_outcomes(np.array(expected), np.array([0.0, 1.0, 0.0] * 5))
    np.testing.assert_allclose(bins.count, exact.count)
    np.testing.assert_allclose(bins.predicted, exact.predicted)
    np.testing.assert_allclose(bins.happened, exact.happened)


def test_confidence_that_comes_with_the_outcome_is_what_counts() -> None:
    """On a GPU the scheduler has selected before it knew the drafts."""
    calibration = ConfidenceCalibration(DEPTH)
    errors = AcceptanceErrors(make_stub(calibration))
    errors.mark("start")
    errors.select(SimpleNamespace(confidence=np.full((1, 2), 0.1), req_ids=("a",)))
    confidence = np.array([[0.9, 0.9]])
    one = np.array([1])
    errors.observe(VerificationOutcome(one, one, ("a",), confidence))

    predicted = calibration.predict(confidence, ("a",))[0, 0]
    assert errors.bins().predicted.sum() == pytest.approx(predicted)


def test_drafts_without_confidence_and_policies_without_calibration_have_none() -> None:
    errors = AcceptanceErrors(make_stub(ConfidenceCalibration(DEPTH)))
    errors.mark("start")
    errors.select(SimpleNamespace(confidence=None, req_ids=("a",)))
    errors.observe(VerificationOutcome(np.array([1]), np.array([1]), ("a",)))
    assert errors.bins().curve() is None
    with watch_acceptance(SimpleNamespace(_planner=FixedPlanner(2))) as nothing:
        assert nothing is None
    with watch_acceptance(SimpleNamespace()) as nothing:
        assert nothing is None


def test_a_row_pools_the_outcomes_of_its_rounds() -> None:
    rng = np.random.default_rng(1)
    rounds = []
    for _ in range(5):
        probability = rng.uniform(0.0, 1.0, 200)
        rounds.append((probability, (rng.random(200) < probability).astype(float)))
    measurements = [
        measured("goodput:8", number, 100.0)
        | {"calibration_bins": sum_outcomes(*one).as_dict()}
        for number, one in enumerate(rounds, start=1)
    ]
    (row,) = make_rows(measurements, [CELL], [parse_arm("goodput:8")])
    pooled = bin_outcomes(*(np.concatenate(part) for part in zip(*rounds, strict=True)))

    assert pooled is not None
    assert row["calibration_error"] == pytest.approx(pooled.error)
    assert row["calibration_exact_error"] == pytest.approx(pooled.exact_error)
    # Chance is less than in any one round, and so is what it explains.
    single = bin_outcomes(*rounds[0])
    assert single is not None
    assert pooled.exact_error < 0.6 * single.exact_error


def test_bins_add_up() -> None:
    first = sum_outcomes(np.array([0.05, 0.95, 1.0]), np.array([0.0, 1.0, 1.0]))
    second = sum_outcomes(np.array([0.95]), np.array([0.0]))
    both = add_up_bins([first.as_dict(), second.as_dict()])
    assert both.count.tolist() == [1, *[0] * 8, 3]
    assert both.happened.tolist() == [0, *[0] * 8, 2]
    assert both.predicted[-1] == pytest.approx(2.9)
    nothing = sum_outcomes(np.empty(0), np.empty(0)).as_dict()
    assert add_up_bins([nothing]).curve() is None
