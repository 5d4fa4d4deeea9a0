"""Online calibration: what it learns, forgets and never looks at."""

from __future__ import annotations

import numpy as np
import pytest

from policies.estimators.calibration import ConfidenceCalibration

MAX_DEPTH = 4


def log_odds(probability: np.ndarray) -> np.ndarray:
    return np.log(probability / (1 - probability))


def to_probability(value: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-value))


class Drafter:
    """A made-up drafter whose true acceptance is a known function of confidence."""

    def __init__(self, seed: int, *, slope: float, intercept: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.slope, self.intercept = slope, intercept
        self.effects: dict[str, float] = {}

    def draft(self, req_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
        confidence = self.rng.beta(2, 1, (len(req_ids), MAX_DEPTH)).clip(0.05, 0.995)
        effect = np.array([self.effects.get(req_id, 0.0) for req_id in req_ids])
        truth = self.slope * log_odds(confidence) + self.intercept + effect[:, None]
        return confidence, to_probability(truth)

    def verify(self, acceptance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Verify prefixes of random length; accept up to the first failure."""
        num_verified = self.rng.integers(0, MAX_DEPTH + 1, len(acceptance))
        passed = self.rng.random(acceptance.shape) < acceptance
        passed &= np.arange(MAX_DEPTH) < num_verified[:, None]
        return num_verified, np.cumprod(passed, axis=1).sum(axis=1)


def run(
    model: ConfidenceCalibration, drafter: Drafter, req_ids: list[str], num_steps: int
) -> float:
    """Train for some steps; return the mean error of the last quarter."""
    errors = []
    for _ in range(num_steps):
        confidence, truth = drafter.draft(req_ids)
        errors.append(np.abs(model.predict(confidence, req_ids) - truth).mean())
        num_verified, num_accepted = drafter.verify(truth)
        model.observe(confidence, req_ids, num_verified, num_accepted)
    return float(np.mean(errors[-num_steps // 4 :]))


def test_it_learns_an_overconfident_drafter():
    drafter = Drafter(0, slope=0.6, intercept=-1.0)
    model = ConfidenceCalibration(MAX_DEPTH)
    req_ids = [str(i) for i in range(16)]
    confidence, truth = drafter.draft(req_ids)
    before = np.abs(model.predict(confidence, req_ids) - truth).mean()

    after = run(model, drafter, req_ids, 400)

    assert after < 0.035 < before
    assert model.calibration_error() < 0.03


def test_it_follows_a_workload_shift():
    model = ConfidenceCalibration(MAX_DEPTH)
    req_ids = [str(i) for i in range(16)]
    run(model, Drafter(1, slope=1.0, intercept=1.0), req_ids, 300)
    after_shift = run(model, Drafter(2, slope=1.0, intercept=-1.5), req_ids, 300)
    # The same requests went from far above to far below the model's mean.
    assert after_shift < 0.06


def test_a_request_that_is_easier_than_the_rest_is_told_apart():
    drafter = Drafter(3, slope=1.0, intercept=-0.5)
    req_ids = [str(i) for i in range(8)]
    drafter.effects = {"0": 2.0, "1": -2.0}
    model = ConfidenceCalibration(MAX_DEPTH)
    run(model, drafter, req_ids, 150)

    same = np.full((3, MAX_DEPTH), 0.6)
    easy, hard, unknown = model.predict(same, ["0", "1", "new"])[:, 0]

    assert hard + 0.25 < unknown < easy - 0.15
    model.forget("0")
    assert model.predict(same[:1], ["0"])[0, 0] == pytest.approx(unknown)


def test_what_was_not_verified_or_came_after_a_rejection_teaches_nothing():
    model = ConfidenceCalibration(MAX_DEPTH)
    confidence = np.full((2, MAX_DEPTH), 0.7)
    before = model.export_state()
    model.observe(confidence, ["a", "b"], np.array([0, 0]), np.array([0, 0]))
    assert model.export_state() == before

    # One draft verified and rejected: positions 1 to 3 were never reached.
    model.observe(confidence, ["a", "b"], np.array([4, 0]), np.array([0, 0]))
    assert np.count_nonzero(model.export_state()["info_intercept"]) == 1


def test_probabilities_stay_inside_0_and_1_for_extreme_confidence():
    model = ConfidenceCalibration(MAX_DEPTH)
    predicted = model.predict(np.array([[0.0, 1.0, 1e-12, 1 - 1e-12]]), ["a"])
    assert (predicted > 0).all()
    assert (predicted < 1).all()


def test_a_new_model_starts_below_the_drafters_own_word():
    predicted = ConfidenceCalibration(MAX_DEPTH).predict(
        np.array([[0.6, 0.8, 0.9, 0.99]]), ["a"]
    )
    assert (predicted < [[0.6, 0.8, 0.9, 0.99]]).all()


def test_exported_state_predicts_the_same_elsewhere():
    drafter = Drafter(4, slope=0.7, intercept=-0.4)
    model = ConfidenceCalibration(MAX_DEPTH)
    run(model, drafter, ["a", "b", "c"], 100)
    copy = ConfidenceCalibration(MAX_DEPTH)
    copy.import_state(model.export_state())
    confidence, _ = drafter.draft(["new", "other"])
    np.testing.assert_allclose(
        copy.predict(confidence, ["new", "other"]),
        model.predict(confidence, ["new", "other"]),
    )


def test_state_of_another_depth_is_refused_with_both_depths_named():
    state = ConfidenceCalibration(3).export_state()
    with pytest.raises(ValueError, match=r"'intercept' holds 3 numbers, not 4"):
        ConfidenceCalibration(4).import_state(state)


@pytest.mark.parametrize("confidence", [np.nan, np.inf, -0.1, 1.5])
def test_outcomes_of_an_impossible_confidence_are_refused(confidence):
    calibration = ConfidenceCalibration(2)
    before = calibration.export_state()

    with pytest.raises(ValueError, match="row 1"):
        calibration.observe(
            np.array([[0.5, 0.5], [0.5, confidence]]),
            ["a", "b"],
            np.array([2, 2]),
            np.array([2, 1]),
        )

    assert calibration.export_state() == before
    assert len(calibration._requests) == 0


@pytest.mark.parametrize(("verified", "accepted"), [(2, 3), (2, -1), (-1, 0)])
def test_outcomes_that_cannot_have_happened_are_refused(verified, accepted):
    calibration = ConfidenceCalibration(2)
    before = calibration.export_state()

    with pytest.raises(ValueError, match="row 0"):
        calibration.observe(
            np.array([[0.5, 0.5]]), ["a"], np.array([verified]), np.array([accepted])
        )

    assert calibration.export_state() == before


def test_what_was_not_observed_may_have_any_confidence():
    calibration = ConfidenceCalibration(3)

    calibration.observe(
        np.array([[0.5, 0.5, np.nan]]), ["a"], np.array([3]), np.array([1])
    )

    assert np.isfinite(calibration.predict(np.full((1, 3), 0.5), ["a"])).all()
