"""What the parts of a step cost, and that they are told apart."""

from dataclasses import replace

import numpy as np
import pytest

from policies.estimators.step_cost import StepCost
from policies.types import CostProfile, StepTiming

BAD_MS = [float("nan"), float("inf"), -1.0]


def make_cost(counts=(), target_ms=(), **more):
    """Return the costs of an engine, after a start-up profile if one is given."""
    cost = StepCost(max_tokens=256, max_reqs=64)
    cost.fit_profile(CostProfile(counts, target_ms, **more))
    return cost


def take_step(
    target_ms,
    num_decode_tokens=16,
    *,
    num_prompt_tokens=0,
    context=800,
    depth=0,
    drafter_ms=(0.0, 0.0),
    num_reqs=8,
    host_ms=1.0,
):
    """Time a step, by default of eight requests that nothing was drafted for."""
    load = num_reqs, num_decode_tokens, num_prompt_tokens, context, depth
    return StepTiming(*load, target_ms, *drafter_ms, host_ms)


def draw_step(rng):
    """Time a step of a made-up engine whose parts are known."""
    num_reqs, depth = int(rng.integers(1, 33)), int(rng.integers(0, 5))
    num_tokens = num_reqs * int(rng.integers(1, 4))
    first_ms = 1.0 + 0.05 * num_tokens if depth else 0.0
    return take_step(
        (12 + 0.8 * num_tokens) * rng.lognormal(0, 0.02),
        num_tokens,
        context=100 * num_reqs,
        depth=depth,
        drafter_ms=(first_ms, max(depth - 1, 0) * 2.4),
        num_reqs=num_reqs,
        host_ms=1.0 + 0.02 * num_reqs,
    )


def learn(cost, seed, steps):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        cost.observe(draw_step(rng))


def test_parts_are_told_apart():
    cost = make_cost()
    learn(cost, 3, 600)
    assert cost.report()["step_time_error"] < 0.06
    # With the context that batches of this size had: the two grow together here.
    assert cost.target.at(16.0) + cost.context_ms(800) == pytest.approx(24.8, rel=0.08)
    assert float(cost.draft_next_ms(16, 4)) == pytest.approx(7.2, rel=0.08)
    assert float(cost.draft_next_ms(16, 1)) == 0.0
    # An engine that does not time sampling pays nothing for it.
    assert not cost.sampling.predict_ms(8, np.arange(4.0)).any()
    assert not cost.sampling.predict_range_ms(8, 0, 4).any()


def test_a_drafter_that_does_not_run_drifts_with_the_target():
    cost = make_cost()
    for _ in range(100):
        cost.observe(take_step(20.0, 8, depth=3, drafter_ms=(2.0, 4.0)))
    before = float(cost.draft_next_ms(8, 3))
    for _ in range(100):
        cost.observe(take_step(40.0, 8))
    assert float(cost.draft_next_ms(8, 3)) == pytest.approx(2 * before, rel=0.35)
    # One pass that confirms it must not be taken for the exception.
    cost.observe(take_step(40.0, 8, depth=3, drafter_ms=(4.0, 8.0)))
    assert float(cost.draft_next_ms(8, 3)) == pytest.approx(2 * before, rel=0.2)


def test_a_sudden_slowdown_is_not_taken_for_the_price_of_context():
    cost = make_cost((1, 256), (12.5, 140.0))
    rng = np.random.default_rng(3)
    for step in range(400):
        # Well above the usual for a while when the core is lost.
        context = 6400 if step < 250 else 6800 + step % 7
        target_ms = (20.0 if step < 300 else 40.0) * rng.lognormal(0, 0.03)
        cost.observe(take_step(target_ms, context=context, num_reqs=16))
    # 20 ms over 400 positions would be .05.
    assert cost.target.slope_ms < 0.002
    assert cost.target.at(16) == pytest.approx(40.0, rel=0.15)


def test_growing_contexts_do_not_take_the_price_of_tokens():
    """A load that fills up: more requests, longer contexts and more drafts at once."""
    rng = np.random.default_rng(11)
    cost = StepCost(max_tokens=2048, max_reqs=64)
    counts = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    cost.fit_profile(CostProfile(counts, tuple(30.0 + 1.3 * n for n in counts)))
    for load in (2, 8, 32, 4, 32, 32):
        for step in range(60):
            num_reqs = min(load, 1 + step // 2)
            context = num_reqs * (30 + 2 * min(step, 20) + int(rng.integers(0, 20)))
            decode = num_reqs + int(rng.integers(3, 6)) * num_reqs
            prompt = 30 * int(rng.integers(0, 3))
            exact_ms = 30.0 + 1.3 * (decode + prompt) + 0.003 * context
            exact_ms *= rng.lognormal(0, 0.1)
            more = {"num_prompt_tokens": prompt, "context": context}
            cost.observe(take_step(exact_ms, decode, num_reqs=num_reqs, **more))
    price = (cost.target.at(192) - cost.target.at(64)) / 128
    assert price == pytest.approx(1.3, rel=0.25)
    assert cost.context_ms(2000) < 25.0


def test_a_start_up_profile_replaces_the_priors_unless_it_is_empty_or_impossible():
    profile = CostProfile((1, 16, 64), (8.0, 10.0, 30.0), (1.0, 1.5, 2.0))
    cost = make_cost()
    cost.fit_profile(profile)
    cost.fit_profile(CostProfile((), ()))
    assert cost.num_dropped_timings == 0
    for bad in BAD_MS:
        cost.fit_profile(replace(profile, target_ms=(8.0, bad, 30.0)))
        cost.fit_profile(replace(profile, draft_ms=(bad, 1.5, 2.0)))
    assert cost.num_dropped_timings == 2 * len(BAD_MS)
    assert cost.target.at(16) == pytest.approx(10)
    assert float(cost.draft_next_ms(16, 2)) == pytest.approx(1.5)


@pytest.mark.faults
@pytest.mark.parametrize("bad", BAD_MS)
@pytest.mark.parametrize("part", ["target_ms", "draft_next_ms", "host_ms"])
def test_a_step_that_no_clock_can_have_measured_is_dropped_and_counted(part, bad):
    cost, untouched = make_cost(), make_cost()
    timing = draw_step(np.random.default_rng(1))
    for one in (cost, untouched):
        one.observe(timing)

    cost.observe(replace(timing, **{part: bad}))
    cost.learn([replace(timing, **{part: bad}), timing])
    untouched.learn([timing])

    assert cost.report() == untouched.report() | {"num_dropped_timings": 2}
    assert cost.export_state() == untouched.export_state()
    assert cost.num_steps == untouched.num_steps == 2


def test_what_the_first_draft_costs_is_not_spread_over_all_counts():
    """Else an engine that always drafts prices plain steps a third too high."""
    cost = make_cost((1, 16, 32, 64, 128), (12.0, 20.0, 24.0, 32.0, 48.0))
    rng = np.random.default_rng(1)
    for _ in range(200):
        num_drafts = int(rng.integers(1, 48))
        forward_ms = (16.0 + 0.25 * (16 + num_drafts)) * rng.lognormal(0, 0.02)
        step = take_step(forward_ms, 16 + num_drafts, num_reqs=16)
        cost.observe(replace(step, num_drafts=num_drafts, sample_ms=15.0))

    # Prompts alone leave cold caches, which a plain step does not find.
    alone = take_step(200.0, 0, num_prompt_tokens=900, num_reqs=16)
    cost.observe(replace(alone, sample_ms=9.0))

    num_drafts = np.array([0.0, 1.0, 16.0, 48.0])
    plain_ms, *drafted_ms = cost.sampling.predict_ms(16, num_drafts)
    assert plain_ms < 3.0
    np.testing.assert_allclose(drafted_ms, 15.0, rtol=0.1)
    half_ms = cost.sampling.predict_ms(16, 0.5)
    assert half_ms == pytest.approx((plain_ms + drafted_ms[0]) / 2)
    assert cost.target.at(16) == pytest.approx(20.0, rel=0.05)
    in_range_ms = cost.sampling.predict_range_ms(16, 0, 49)[[0, 1, 16, 48]]
    np.testing.assert_allclose(in_range_ms, [plain_ms, *drafted_ms])
    # One plain step later it is known, too.
    for _ in range(5):
        cost.observe(replace(take_step(20.0, 16, num_reqs=16), sample_ms=2.7))
    assert float(cost.sampling.predict_ms(16, 0)) == pytest.approx(2.7, rel=0.15)
