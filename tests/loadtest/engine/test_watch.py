"""What is noted between engine and planner: predictions beside what happened."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadtest.engine.held_depth import HeldDepth
from loadtest.engine.outcome_bins import add_up_bins, sum_outcomes
from loadtest.engine.trace import save_trace
from loadtest.engine.watch import Watch
from policies.baselines import FixedPlanner
from policies.estimators.calibration import ConfidenceCalibration
from policies.goodput import GoodputPlanner
from policies.types import DraftBatch, EngineLimits, StepTiming, VerificationOutcome

DEPTH = 3
TIMING = StepTiming(
    num_reqs=2,
    num_decode_tokens=4,
    num_prefill_tokens=0,
    num_context_tokens=50,
    depth=2,
    target_ms=9.0,
    draft_first_ms=0.0,
    draft_next_ms=0.0,
    host_ms=1.0,
)


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


def test_outcomes_are_those_of_the_steady_part() -> None:
    watch = Watch(GoodputPlanner.build(DEPTH, EngineLimits()))
    # What the block before and this one's ramp leave behind is no part of it.
    run_steps(watch, 50, num_accepted=0)
    watch.start_over()
    run_steps(watch, 10, num_accepted=0)
    watch.mark("start")
    run_steps(watch, 7, num_accepted=DEPTH)
    watch.mark("end")
    run_steps(watch, 5, num_accepted=0)

    bins = watch.acceptance_bins()

    for one in bins.values():
        assert one.count.sum() == one.happened.sum() == 7 * 2 * DEPTH
    assert bins["confidence_bins"].predicted.sum() == pytest.approx(0.8 * 7 * 2 * DEPTH)
    curve = bins["calibration_bins"].curve()
    assert curve is not None
    mean = bins["calibration_bins"].predicted.sum() / (7 * 2 * DEPTH)
    assert curve.error == pytest.approx(1.0 - mean)


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

    watch = Watch(make_stub(calibration, learn))
    expected: list[float] = []
    for _ in range(5):
        predicted = calibration.predict(confidence, ("a", "b"))
        expected += [predicted[1, 0], *predicted[0, :2]]
        watch.select(SimpleNamespace(confidence=confidence, req_ids=("a", "b")))
        watch.observe(outcome)
    bins = watch.acceptance_bins()["calibration_bins"]

    exact = sum_outcomes(np.array(expected), np.array([0.0, 1.0, 0.0] * 5))
    np.testing.assert_allclose(bins.count, exact.count)
    np.testing.assert_allclose(bins.predicted, exact.predicted)
    np.testing.assert_allclose(bins.happened, exact.happened)


def test_confidence_that_comes_with_the_outcome_is_what_counts() -> None:
    """On a GPU the scheduler has selected before it knew the drafts."""
    calibration = ConfidenceCalibration(DEPTH)
    watch = Watch(make_stub(calibration))
    watch.select(SimpleNamespace(confidence=np.full((1, 2), 0.1), req_ids=("a",)))
    confidence, one = np.array([[0.9, 0.9]]), np.array([1])
    watch.observe(VerificationOutcome(one, one, ("a",), confidence))

    predicted = calibration.predict(confidence, ("a",))[0, 0]
    bins = watch.acceptance_bins()["calibration_bins"]
    assert bins.predicted.sum() == pytest.approx(predicted)


def test_where_nothing_is_predicted_there_is_no_error() -> None:
    without_confidence = Watch(make_stub(ConfidenceCalibration(DEPTH)))
    without_confidence.select(SimpleNamespace(confidence=None, req_ids=("a",)))
    one = np.array([1])
    without_confidence.observe(VerificationOutcome(one, one, ("a",)))
    fixed = Watch(FixedPlanner(DEPTH))
    run_steps(fixed, 3, num_accepted=1)
    fixed.observe_timing(TIMING)

    assert without_confidence.acceptance_bins() == fixed.acceptance_bins() == {}
    assert fixed.step_time_error() is None


def test_the_step_time_error_is_the_median_over_the_steady_part() -> None:
    told: list[Any] = []
    predictions = iter([90.0, 11.0, 9.5, 40.0, 90.0])
    planner = SimpleNamespace(
        cost=SimpleNamespace(predict_ms=lambda timing: next(predictions)),
        observe=lambda outcome: None,
        observe_timing=told.append,
    )
    watch = Watch(planner)
    nothing = SimpleNamespace(req_ids=())
    for step in range(5):
        if step in (1, 4):
            watch.mark("start" if step == 1 else "end")
        watch.observe(nothing)
        watch.observe_timing(TIMING)

    # .1, .05 and 3: one bad step does not make the others bad, as a mean would.
    assert watch.step_time_error() == pytest.approx(0.1)
    assert told == [TIMING] * 5


def test_a_trace_keeps_what_was_offered_admitted_and_accepted(tmp_path: Path) -> None:
    watch = Watch(GoodputPlanner.build(DEPTH, EngineLimits()))
    confidence = np.array([[0.99, 0.98, 0.0], [0.4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch = DraftBatch(np.array([2, 1, 0]), confidence, ("a", "b", "c"), num_decodes=3)
    watch.mark("start")
    selection = watch.select(batch)
    watch.choose_depth(3)
    # The scheduler cut the draft of b.
    one = np.array([1])
    watch.observe(VerificationOutcome(one, one, ("a",)))
    watch.observe_timing(TIMING)
    watch.mark("end")
    watch.observe(VerificationOutcome(one[:0], one[:0]))

    save_trace(watch, tmp_path / "folder" / "trace.npz", {"calibration": 0.5})
    trace = np.load(tmp_path / "folder" / "trace.npz")

    assert trace["step_total_ms"].tolist()[0] == 10.0
    assert trace["step_depth"].tolist()[0] == 2.0
    assert trace["step_admitted"][0] == selection.num_admitted.sum()
    assert trace["step_predicted_ms"][0] > 0
    assert np.isnan(trace["step_total_ms"][1])
    assert trace["window"].tolist() == [0, 1]
    assert json.loads(str(trace["state"])) == {"calibration": 0.5}
    assert trace["draft_num_offered"].tolist() == [2, 1]
    assert trace["draft_num_admitted"].tolist() == selection.num_admitted[:2].tolist()
    assert trace["draft_num_verified"].tolist() == [1, 0]
    assert trace["draft_num_accepted"].tolist() == [1, -1]
    assert trace["draft_confidence"][0, :2] == pytest.approx([0.99, 0.98])
    predicted = trace["draft_predicted"]
    assert 0.0 < predicted[0, 0] < 1.0
    assert np.isnan(predicted[1]).all()


def test_a_planner_held_at_depth_0_plans_and_drafts_nothing() -> None:
    planner = GoodputPlanner.build(8, EngineLimits(skips_drafter=True))
    held = HeldDepth(planner)

    depths = {held.choose_depth(4, None) for _ in range(200)}

    assert depths == {0}
    # It has planned, which is part of the price, and believes that it chose depth 0.
    assert planner.plan.tokens_per_ms > 0
    assert planner.plan.depth == 0
    assert held.report() == planner.report()


def test_calibration_error_weighs_bins_by_their_size() -> None:
    # Three predictions of .9, all accepted (off by .1); one of .1, accepted (off .9).
    curve = sum_outcomes(np.array([0.9, 0.9, 0.9, 0.1]), np.ones(4)).curve()

    assert curve is not None
    assert curve.error == pytest.approx((3 * 0.1 + 0.9) / 4)
    assert curve.count.tolist() == [1, 3]


def test_exact_predictions_are_off_by_chance_alone_and_less_so_together() -> None:
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(300):
        probability = rng.uniform(0.0, 1.0, 400)
        happened = (rng.random(400) < probability).astype(float)
        rounds.append(sum_outcomes(probability, happened))
    curves = [curve for one in rounds if (curve := one.curve())]
    error, by_chance = np.mean([(one.error, one.exact_error) for one in curves], axis=0)

    assert error == pytest.approx(by_chance, rel=0.05)
    assert 0.04 < by_chance < 0.06
    together = add_up_bins([one.as_dict() for one in rounds[:9]]).curve()
    assert together is not None
    assert together.count.sum() == 9 * 400
    assert together.exact_error == pytest.approx(by_chance / 3, rel=0.1)
    nothing = sum_outcomes(np.empty(0), np.empty(0)).as_dict()
    assert add_up_bins([nothing]).curve() is None
