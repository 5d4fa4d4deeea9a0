"""What is believed of a drafter before its first outcome."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.estimators.priors import prior_of
from policies.goodput import GoodputPlanner
from policies.types import DraftBatch
from tests.policies.test_goodput import LIMITS

METHODS = ("draft_model", "eagle", "eagle3", "mtp", "ngram", "suffix")


@pytest.mark.parametrize("method", METHODS)
def test_no_drafter_is_believed_more_than_it_says(method: str):
    planner = GoodputPlanner.build(3, replace(LIMITS, method=method))
    confidence = np.array([[0.6, 0.8, 0.99]])
    predicted = planner.acceptance.calibration.predict(confidence, ["new"])
    assert (predicted < confidence).all()


def test_an_unknown_method_starts_like_a_model_of_its_own():
    assert prior_of("something_new") == prior_of("draft_model")


def test_drafts_without_confidence_start_from_their_methods_prior():
    batch = DraftBatch(np.array([2, 2]), None, ("a", "b"), 2)

    def expected(method: str) -> float:
        planner = GoodputPlanner.build(3, replace(LIMITS, method=method))
        return float(planner.acceptance.predict(batch)[0, 0])

    assert expected("ngram") == pytest.approx(0.3)
    assert expected("suffix") == pytest.approx(0.5)
