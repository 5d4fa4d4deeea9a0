"""When a draft ends: prices, batches, and what the rule must not look at."""

from __future__ import annotations

import numpy as np
import pytest

from policies.decisions.early_exit import EarlyExitRule
from policies.estimators.logit import to_log_odds, to_probability
from policies.types import AcceptanceScale

PLAIN = AcceptanceScale(1.0, np.zeros(4), np.zeros(3), 8.0)
"""Confidence is acceptance."""


def make_stop(**changes: object) -> EarlyExitRule:
    values = {
        "req_ids": ("a", "b", "c"),
        "scale": PLAIN,
        "max_depth": 4,
        "next_acceptance": np.array([0.8]),
        "pass_price": 0.5,
        "token_price": 0.1,
    }
    return EarlyExitRule(**(values | changes))


def test_a_pass_is_worth_what_all_requests_may_gain_less_their_verification():
    # (0.9 + 0.5 + 0.1) * 0.8 - 0.1 each, nothing for the third: 0.62 + 0.3.
    confidence = [0.9, 0.5, 0.1]
    surplus = 0.9 * 0.8 - 0.1 + 0.5 * 0.8 - 0.1
    for price, pays in ((surplus - 0.01, True), (surplus + 0.01, False)):
        watch = make_stop(pass_price=price).start(("a", "b", "c"))
        assert watch.should_continue(confidence) is pays


def test_survival_falls_from_pass_to_pass():
    watch = make_stop(pass_price=0.2).start(("a",))
    weighted_survival = [0.8 * 0.8**passes - 0.1 for passes in range(1, 4)]
    assert min(weighted_survival) > 0.2
    assert watch.should_continue([0.8])
    assert watch.should_continue([0.8])
    assert watch.weighted_survival == pytest.approx([0.64])
    assert not watch.should_continue([0.3])


def test_a_pass_that_is_not_about_these_requests_is_refused():
    watch = make_stop().start(("a", "b", "c"))
    with pytest.raises(ValueError, match="2 confidences for 3 requests"):
        watch.should_continue([0.5, 0.5])


def test_no_pass_after_the_deepest():
    watch = make_stop(max_depth=2, pass_price=0.0, token_price=0.0).start(("a",))
    assert watch.should_continue([0.99])
    assert not watch.should_continue([0.99])


def test_only_the_good_outcomes_of_the_next_position_count():
    """A mean would hide them: nothing is verified where it turns out badly."""
    confidence, both = [0.5], np.array([0.1, 0.9])
    mean = make_stop(
        token_price=0.25, pass_price=0.05, next_acceptance=np.array([both.mean()])
    )
    assert not mean.start(("a",)).should_continue(confidence)
    spread = make_stop(token_price=0.25, pass_price=0.05, next_acceptance=both)
    assert spread.start(("a",)).should_continue(confidence)


def test_nothing_follows_a_stop_token():
    confidence = [0.9, 0.9]
    assert make_stop().start(("a", "b")).should_continue(confidence)
    watch = make_stop().start(("a", "b"))
    assert not watch.should_continue(confidence, [0, 1])
    assert watch.weighted_survival == pytest.approx([0.0, 0.0])


def test_weights_and_effects_go_with_their_requests_and_others_gain_nothing():
    scale = AcceptanceScale(1.0, np.zeros(4), np.array([3.0, 0.0, -3.0]), 8.0)
    stop = make_stop(scale=scale, weights=np.array([2.0, 0.5, 0.5]))
    watch = stop.start(("c", "new", "a"))
    watch.should_continue([0.5, 0.5, 0.5])
    odds = np.exp([-3.0, 0.0, 3.0])
    assert watch.weighted_survival == pytest.approx([0.5, 0.0, 2.0] * odds / (1 + odds))


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_is_priced_as_written_down(seed: int):
    """Against the formulas themselves, request by request and outcome by outcome."""
    rng = np.random.default_rng(seed)
    req_ids = tuple(range(int(rng.integers(1, 6))))
    effect = rng.normal(0.0, 1.0, len(req_ids))
    intercept = rng.normal(0.0, 0.5, 4)
    weights = rng.uniform(0.5, 2.0, len(req_ids))
    outcomes = np.sort(rng.random(8))
    stop = make_stop(
        req_ids=req_ids,
        scale=AcceptanceScale(1.2, intercept, effect, 8.0),
        next_acceptance=outcomes,
        pass_price=float(rng.uniform(0.01, 0.5)),
        weights=weights,
    )
    watch, weighted_survival = stop.start(req_ids), weights.copy()
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
