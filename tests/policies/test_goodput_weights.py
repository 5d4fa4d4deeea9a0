"""The goodput planner with requests that are worth more, or in more of a hurry."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from policies.depth_control import REPLAN_EVERY
from policies.exploration import Exploration
from policies.types import DraftBatch
from tests.policies.test_goodput import MadeUpEngine, make_goodput


def make_batch(confidence: np.ndarray, **more: object) -> DraftBatch:
    num_reqs, depth = confidence.shape
    return DraftBatch(
        num_draft_tokens=np.full(num_reqs, depth),
        confidence=confidence,
        req_ids=tuple(range(num_reqs)),
        num_decodes=num_reqs,
        num_context_tokens=100 * num_reqs,
        **more,
    )


def trained(num_reqs: int, token_ms: float = 3.0, **kw: float):
    """Return a planner that knows what steps cost, and neither probes nor explores."""
    planner = make_goodput(**kw)
    engine = MadeUpEngine(num_reqs, token_ms=token_ms)
    engine.run(planner, 300)
    # Counts of tokens that were never tried have their true price too.
    counts = range(1, 65)
    planner.cost.target.fit_profile(
        counts, [engine.base_ms + token_ms * count for count in counts]
    )
    planner.depth.exploration = Exploration()
    planner.choose_depth(num_reqs)
    return planner


@pytest.mark.parametrize("seed", range(8))
def test_weighted_expected_tokens_minus_priced_time_are_the_largest_of_all(seed: int):
    rng = np.random.default_rng(seed)
    planner = trained(4)
    confidence, weights = rng.uniform(0.3, 0.99, (4, 3)), rng.uniform(0.5, 4.0, 4)
    batch = make_batch(confidence, weights=weights)
    survival = np.cumprod(
        planner.acceptance.calibration.predict(confidence, range(4)), axis=1
    )
    worth = survival * (weights / weights.mean())[:, None]
    price = planner.plan.tokens_per_ms

    def surplus(admitted: tuple[int, ...]) -> float:
        num_tokens = np.array([4.0 + sum(admitted)])
        cost_ms = float(planner.depth.costs.verify_ms(num_tokens)[0])
        gained = sum(worth[i, :count].sum() for i, count in enumerate(admitted))
        return gained - price * cost_ms

    best = max(surplus(admitted) for admitted in product(range(4), repeat=4))
    assert surplus(tuple(planner.select(batch).num_admitted)) == pytest.approx(best)


def test_equal_weights_change_nothing():
    confidence = np.random.default_rng(1).uniform(0.2, 0.99, (6, 4))
    plain = trained(6).select(make_batch(confidence))
    weighed = trained(6).select(make_batch(confidence, weights=np.full(6, 7.0)))
    np.testing.assert_array_equal(plain.num_admitted, weighed.num_admitted)
    assert plain.expected_accepted == pytest.approx(weighed.expected_accepted)


def test_the_same_drafts_are_verified_for_the_request_that_is_worth_more():
    confidence = np.tile([0.75, 0.7, 0.65], (6, 1))
    weights = np.array([1.0, 1.0, 8.0, 1.0, 1.0, 1.0])
    admitted = trained(6).select(make_batch(confidence, weights=weights)).num_admitted
    assert admitted[2] > admitted.max(where=np.arange(6) != 2, initial=0)


def late(targets_ms: list[float]) -> np.ndarray:
    return np.array(targets_ms, dtype=np.float64)


def test_a_request_that_would_miss_its_target_gets_its_drafts_first():
    # At 5 ms a token and rather unlikely drafts, throughput wants none of them.
    confidence = np.tile([0.6, 0.5, 0.4], (8, 1))
    planner = trained(8, token_ms=5.0)
    free = planner.select(make_batch(confidence)).num_admitted
    targets_ms = late([np.inf] * 7 + [40.0])
    bound = planner.select(make_batch(confidence, latency_targets_ms=targets_ms))
    assert free.sum() == 0
    np.testing.assert_array_equal(bound.num_admitted[:7], 0)
    assert bound.num_admitted[7] >= 1


def test_a_request_that_meets_its_target_anyway_gets_nothing_extra():
    confidence = np.tile([0.6, 0.5, 0.4], (8, 1))
    planner = trained(8, token_ms=5.0)
    targets_ms = late([np.inf] * 7 + [500.0])
    admitted = planner.select(
        make_batch(confidence, latency_targets_ms=targets_ms)
    ).num_admitted
    np.testing.assert_array_equal(admitted, 0)


def test_drafts_of_the_others_do_not_make_a_request_miss_its_target():
    confidence = np.full((8, 3), 0.97)
    confidence[7] = 0.1
    planner = trained(8, token_ms=0.85)
    free = planner.select(make_batch(confidence))
    # Eight tokens take about 20 ms with the drafter's first pass.
    fixed_ms = planner.depth.costs.fixed_ms(make_batch(confidence))
    base_ms = fixed_ms + float(planner.depth.costs.verify_ms(np.array([8.0]))[0])
    targets_ms = late([np.inf] * 7 + [1.3 * base_ms])
    bound = planner.select(make_batch(confidence, latency_targets_ms=targets_ms))
    assert (
        bound.num_cut_by_latency == free.num_admitted.sum() - bound.num_admitted.sum()
    )
    assert 0 < bound.num_admitted.sum() < free.num_admitted.sum()
    num_tokens = np.array([8.0 + bound.num_admitted.sum()])
    step_ms = fixed_ms + float(planner.depth.costs.verify_ms(num_tokens)[0])
    assert step_ms <= 1.3 * base_ms


def test_a_target_out_of_reach_does_not_take_the_others_drafts_away():
    confidence = np.full((8, 3), 0.97)
    planner = trained(8, token_ms=0.85)
    free = planner.select(make_batch(confidence))
    targets_ms = late([np.inf] * 7 + [0.5])
    bound = planner.select(make_batch(confidence, latency_targets_ms=targets_ms))
    assert bound.num_cut_by_latency == 0
    assert bound.num_admitted.sum() >= free.num_admitted.sum()


def test_sampled_drafts_stay_judged_by_what_was_known_before_them():
    planner = make_goodput()
    MadeUpEngine(16).run(planner, 200, sampled=True)
    planner.depth.exploration = Exploration()
    rng = np.random.default_rng(3)
    more = {
        "weights": np.array([1.0, 5.0, 1.0, 2.0, 1.0, 1.0]),
        "latency_targets_ms": late([20.0, np.inf, 12.0, np.inf, 15.0, np.inf]),
        "drafts_are_sampled": True,
    }
    for _ in range(3):
        confidence = rng.uniform(0.3, 0.99, (6, 3))
        before = planner.select(make_batch(confidence, **more)).num_admitted
        for position in range(3):
            changed = confidence.copy()
            changed[:, position:] = rng.uniform(0.01, 0.999, (6, 3 - position))
            after = planner.select(make_batch(changed, **more)).num_admitted
            np.testing.assert_array_equal(
                np.minimum(after, position), np.minimum(before, position)
            )


def test_the_depth_follows_the_tightest_target_that_can_be_met():
    planner = trained(8, token_ms=5.0)
    # A drafter so slow that nothing pays for its first pass.
    planner.cost.draft_first.fit_profile((1, 64), (12.0, 12.0))
    for _ in range(REPLAN_EVERY):
        assert planner.choose_depth(8) in (0, 1)
    assert planner.choose_depth(8) == 0
    plain_ms = float(planner.depth.costs.verify_ms(np.array([8.0]))[0])
    assert planner.choose_depth(8, 0.01 * plain_ms) == 0
    assert planner.choose_depth(8, 0.8 * plain_ms) > 0
