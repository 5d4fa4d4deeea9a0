"""When a draft ends: prices, batches, and what the rule must not look at."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.early_exit import EarlyExitRule
from policies.estimators.logit import to_log_odds, to_probability
from policies.types import AcceptanceScale


def make_stop(**changes: object) -> EarlyExitRule:
    values = {
        "req_ids": ("a", "b", "c"),
        # Confidence is acceptance.
        "scale": AcceptanceScale(1.0, np.zeros(4), np.zeros(3), 8.0),
        "max_depth": 4,
        "next_acceptance": np.array([0.8]),
        "pass_price": 0.5,
        "token_price": 0.1,
    }
    return EarlyExitRule(**(values | changes))


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_is_priced_as_written_down(seed: int):
    """Against the formulas themselves, request by request and outcome by outcome.

    Only the good outcomes of the next position count, for a draft that turns out badly
    is not verified; nothing follows a stop token.
    """
    rng = np.random.default_rng(seed)
    req_ids = tuple(range(int(rng.integers(1, 6))))
    effect = rng.normal(0.0, 1.0, len(req_ids))
    intercept = rng.normal(0.0, 0.5, 4)
    weights = rng.uniform(0.5, 2.0, len(req_ids)) if seed % 3 else None
    outcomes = np.sort(rng.random(8))
    stop = make_stop(
        req_ids=req_ids,
        scale=AcceptanceScale(1.2, intercept, effect, 8.0),
        next_acceptance=outcomes,
        pass_price=float(rng.uniform(0.01, 0.5)),
        weights=weights,
    )
    watch = stop.start(req_ids)
    weighted_survival = np.ones(len(req_ids)) if weights is None else weights.copy()
    for position in range(3):
        confidence = rng.choice([0.0, 1.0, *rng.random(4)], len(req_ids)).tolist()
        ended = [0] if rng.random() < 0.2 else []
        odds = 1.2 * to_log_odds(np.array(confidence)) + intercept[position] + effect
        weighted_survival *= to_probability(odds)
        weighted_survival[ended] = 0.0
        gain = np.maximum(np.outer(weighted_survival, outcomes) - stop.token_price, 0.0)
        pays = float(gain.sum()) > stop.pass_price * outcomes.size
        assert watch.should_continue(confidence, ended) is pays
        assert watch.weighted_survival == pytest.approx(weighted_survival)


def test_a_pass_that_is_not_about_these_requests_is_refused():
    watch = make_stop().start(("a", "b", "c"))
    with pytest.raises(ValueError, match="2 confidences for 3 requests"):
        watch.should_continue([0.5, 0.5])


def test_no_pass_after_the_deepest():
    watch = make_stop(max_depth=2, pass_price=0.0, token_price=0.0).start(("a",))
    assert watch.should_continue([0.99])
    assert not watch.should_continue([0.99])


def test_weights_and_effects_go_with_their_requests_and_others_gain_nothing():
    scale = AcceptanceScale(1.0, np.zeros(4), np.array([3.0, 0.0, -3.0]), 8.0)
    stop = make_stop(scale=scale, weights=np.array([2.0, 0.5, 0.5]))
    watch = stop.start(("c", "new", "a"))
    watch.should_continue([0.5, 0.5, 0.5])
    odds = np.exp([-3.0, 0.0, 3.0])
    assert watch.weighted_survival == pytest.approx([0.5, 0.0, 2.0] * odds / (1 + odds))
