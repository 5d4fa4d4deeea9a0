"""The goodput planner with requests that are worth more, or in more of a hurry."""

from itertools import product

import numpy as np
import pytest

from policies.depth_control import REPLAN_EVERY
from policies.exploration import Exploration
from policies.types import DraftBatch
from tests.policies.made_up import MadeUpEngine, make_goodput

UNLIKELY = np.tile([0.6, 0.5, 0.4], (8, 1))


def make_batch(confidence, own_target_ms=np.inf, **more):
    """Return drafts of equal length; the last request has a target, if any has."""
    num_reqs, depth = confidence.shape
    targets_ms = np.array([np.inf] * (num_reqs - 1) + [own_target_ms])
    return DraftBatch(
        num_draft_tokens=np.full(num_reqs, depth),
        confidence=confidence,
        req_ids=tuple(range(num_reqs)),
        num_decodes=num_reqs,
        num_context_tokens=100 * num_reqs,
        **({"latency_targets_ms": targets_ms} | more),
    )


def trained(num_reqs, token_ms=3.0):
    """Return a planner that knows what steps cost, and neither probes nor explores."""
    planner = make_goodput()
    engine = MadeUpEngine(num_reqs, token_ms=token_ms)
    engine.run(planner, 300)
    # Counts of tokens that were never tried have their true price too.
    counts = range(1, 65)
    prices_ms = [engine.base_ms + token_ms * count for count in counts]
    planner.cost.target.fit_profile(counts, prices_ms)
    planner.depth.exploration = Exploration()
    planner.choose_depth(num_reqs)
    return planner


def verify_ms(planner, num_reqs, num_drafts=0):
    drafts = np.array([float(num_drafts)])
    return float(planner.depth.costs.verify_ms(num_reqs, drafts)[0])


@pytest.mark.parametrize("seed", range(8))
def test_weighted_expected_tokens_minus_priced_time_are_the_largest_of_all(seed):
    rng = np.random.default_rng(seed)
    planner = trained(4)
    confidence, weights = rng.uniform(0.3, 0.99, (4, 3)), rng.uniform(0.5, 4.0, 4)
    acceptance = planner.acceptance.calibration.predict(confidence, range(4))
    worth = np.cumprod(acceptance, axis=1) * (weights / weights.mean())[:, None]
    price = planner.plan.tokens_per_ms

    def surplus(admitted):
        gained = sum(worth[i, :count].sum() for i, count in enumerate(admitted))
        return gained - price * verify_ms(planner, 4, sum(admitted))

    best = max(surplus(admitted) for admitted in product(range(4), repeat=4))
    selection = planner.select(make_batch(confidence, weights=weights))
    assert surplus(tuple(selection.num_admitted)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("target_ms", "gets_drafts"), [(np.inf, False), (500.0, False), (40.0, True)]
)
def test_a_request_that_would_miss_its_target_gets_drafts_first(target_ms, gets_drafts):
    # At 5 ms a token and rather unlikely drafts, throughput wants none of them.
    planner = trained(8, token_ms=5.0)
    planner.choose_depth(8, target_ms)
    admitted = planner.select(make_batch(UNLIKELY, target_ms)).num_admitted
    np.testing.assert_array_equal(admitted[:7], 0)
    assert (admitted[7] > 0) == gets_drafts


def test_drafts_of_the_others_do_not_make_a_request_miss_its_target():
    confidence = np.full((8, 3), 0.97)
    confidence[7] = 0.1
    planner = trained(8, token_ms=0.85)
    free = planner.select(make_batch(confidence))
    # Eight tokens take about 20 ms with the drafter's first pass.
    fixed_ms = planner.depth.costs.fixed_ms(make_batch(confidence))
    target_ms = 1.3 * (fixed_ms + verify_ms(planner, 8))
    bound = planner.select(make_batch(confidence, target_ms))
    num_free, num_bound = free.num_admitted.sum(), bound.num_admitted.sum()
    assert bound.num_cut_by_latency == num_free - num_bound
    assert 0 < num_bound < num_free
    assert fixed_ms + verify_ms(planner, 8, num_bound) <= target_ms


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_target_out_of_reach_changes_nothing(is_sampled):
    planner, more = trained(8), {"drafts_are_sampled": is_sampled}
    for planned_ms in (None, 0.5):
        planner.choose_depth(8, planned_ms)
        free = planner.select(make_batch(UNLIKELY, **more))
        missed = planner.select(make_batch(UNLIKELY, 0.5, **more))
        assert missed.num_cut_by_latency == free.num_cut_by_latency == 0
        np.testing.assert_array_equal(missed.num_admitted, free.num_admitted)


def test_sampled_drafts_stay_judged_by_what_was_known_before_them():
    planner = make_goodput()
    MadeUpEngine(16).run(planner, 200, sampled=True)
    planner.depth.exploration = Exploration()
    rng = np.random.default_rng(3)
    more = {
        "weights": np.array([1.0, 5.0, 1.0, 2.0, 1.0, 1.0]),
        "latency_targets_ms": np.array([20.0, np.inf, 12.0, np.inf, 15.0, np.inf]),
        "drafts_are_sampled": True,
    }
    for _ in range(3):
        confidence = rng.uniform(0.3, 0.99, (6, 3))
        before = planner.select(make_batch(confidence, **more)).num_admitted
        for position in range(3):
            changed = confidence.copy()
            changed[:, position:] = rng.uniform(0.01, 0.999, (6, 3 - position))
            after = planner.select(make_batch(changed, **more)).num_admitted
            assert (np.minimum(after, position) == np.minimum(before, position)).all()


def test_the_depth_follows_the_tightest_target_that_can_be_met():
    planner = trained(8, token_ms=5.0)
    # A drafter so slow that nothing pays for its first pass.
    planner.cost.draft_first.fit_profile((1, 64), (12.0, 12.0))
    for _ in range(REPLAN_EVERY):
        assert planner.choose_depth(8) in (0, 1)
    assert planner.choose_depth(8) == 0
    plain_ms = verify_ms(planner, 8)
    assert planner.choose_depth(8, 0.01 * plain_ms) == 0
    assert planner.choose_depth(8, 0.8 * plain_ms) > 0
