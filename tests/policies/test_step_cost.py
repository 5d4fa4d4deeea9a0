"""Step costs: tables that learn, parts that are told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.estimators.cost_table import CostTable, make_knots
from policies.estimators.step_cost import StepCost
from policies.types import CostProfile, StepTiming


def make_timing(rng: np.random.Generator, *, speed: float = 1.0) -> StepTiming:
    """Time a step of a made-up engine whose parts are known."""
    num_reqs = int(rng.integers(1, 33))
    depth = int(rng.integers(0, 5))
    num_decode_tokens = num_reqs + int(rng.integers(0, 3)) * num_reqs
    noise = rng.lognormal(0, 0.02)
    return StepTiming(
        num_reqs=num_reqs,
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=0,
        num_context_tokens=100 * num_reqs,
        depth=depth,
        target_ms=speed * (12 + 0.8 * num_decode_tokens) * noise,
        draft_first_ms=speed * (1.0 + 0.05 * num_decode_tokens) if depth else 0.0,
        draft_next_ms=speed * max(depth - 1, 0) * 2.4,
        host_ms=1.0 + 0.02 * num_reqs,
    )


def learn(cost: StepCost, rng: np.random.Generator, steps: int, **kw: float) -> None:
    for _ in range(steps):
        cost.observe(make_timing(rng, **kw))


def test_a_trend_that_falls_does_not_make_large_steps_free_and_then_endless():
    """Without a profile, from a prior that is far too dear per token."""
    table = CostTable(64, first_ms=20.0, per_unit_ms=0.5)
    context = 40.0
    for count in [16] * 2 + [24] * 13 + [8] + [40] * 4 + [36] * 3 + [8] * 60:
        context += 16.0
        table.observe(count, 9.0, context)
        assert 0.0 < float(table.predict(40.0)) < 100.0


def test_knots_are_dense_where_batches_live_and_end_at_the_limit():
    knots = make_knots(1000)
    assert knots[:16].tolist() == list(range(1, 17))
    assert knots[-3:].tolist() == [512, 768, 1000]
    assert (np.diff(knots) > 0).all()
    assert make_knots(1).tolist() == [1]


def test_a_table_is_monotone_whatever_it_is_told():
    table = CostTable(64, first_ms=5, per_unit_ms=1)
    rng = np.random.default_rng(0)
    for _ in range(500):
        table.observe(int(rng.integers(1, 65)), float(rng.exponential(20)))
    assert (np.diff(table.predict(np.arange(1.0, 100.0))) >= -1e-9).all()


def test_nothing_costs_nothing():
    assert CostTable(8, first_ms=5, per_unit_ms=1).predict(0.0) == 0.0


def test_one_outlier_moves_a_settled_table_little():
    table = CostTable(64, first_ms=10, per_unit_ms=1)
    table.fit_profile((1, 64), (13.0, 76.0))
    for _ in range(200):
        table.observe(8, 20.0)
    table.observe(8, 2000.0)
    assert float(table.predict(8.0)) == pytest.approx(20.0, rel=0.05)


def test_a_staircase_shows_as_one():
    # An engine that pads to multiples of 8.
    table = CostTable(32, first_ms=1, per_unit_ms=1)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        count = int(rng.integers(1, 17))
        table.observe(count, 10.0 * -(-count // 8))
    flat = table.predict(np.array([1.0, 7.0]))
    assert flat == pytest.approx([10, 10], rel=0.1)
    assert table.predict(np.array([10.0, 15.0])) == pytest.approx([20, 20], rel=0.1)


def test_step_time_is_predicted_within_a_few_per_cent_after_some_steps():
    cost = StepCost(max_tokens=256, max_reqs=64)
    rng = np.random.default_rng(2)
    learn(cost, rng, 400)
    assert cost.prediction_error() < 0.06


def test_parts_are_told_apart():
    cost = StepCost(max_tokens=256, max_reqs=64)
    learn(cost, np.random.default_rng(3), 600)
    # With the context that batches of this size had: the two grow together here.
    assert float(cost.target_ms(16.0, 800)) == pytest.approx(24.8, rel=0.08)
    assert float(cost.draft_next_ms(16, 4)) == pytest.approx(7.2, rel=0.08)
    assert float(cost.draft_next_ms(16, 1)) == 0.0


def test_a_stolen_core_is_noticed_within_fifty_steps_at_every_count():
    cost = StepCost(max_tokens=256, max_reqs=64)
    rng = np.random.default_rng(4)
    learn(cost, rng, 400)
    learn(cost, rng, 50, speed=2.0)
    sizes = np.array([2.0, 16.0, 60.0])
    assert cost.target.predict(sizes) == pytest.approx(2 * (12 + 0.8 * sizes), rel=0.2)


def test_a_drafter_that_does_not_run_drifts_with_the_target():
    cost = StepCost(max_tokens=256, max_reqs=64)
    timing = StepTiming(8, 8, 0, 800, 3, 20.0, 2.0, 4.0, 1.0)
    for _ in range(100):
        cost.observe(timing)
    before = float(cost.draft_next_ms(8, 3))
    idle = StepTiming(8, 8, 0, 800, 0, 40.0, 0.0, 0.0, 1.0)
    for _ in range(100):
        cost.observe(idle)
    assert float(cost.draft_next_ms(8, 3)) == pytest.approx(2 * before, rel=0.35)
    # One pass that confirms it must not be taken for the exception.
    cost.observe(StepTiming(8, 8, 0, 800, 3, 40.0, 4.0, 8.0, 1.0))
    assert float(cost.draft_next_ms(8, 3)) == pytest.approx(2 * before, rel=0.2)


def test_a_stolen_core_is_noticed_where_every_step_carries_a_prompt():
    cost = StepCost(max_tokens=512, max_reqs=64)
    rng = np.random.default_rng(7)

    def serve(steps: int, speed: float) -> None:
        for _ in range(steps):
            verified, prompt = int(rng.integers(8, 30)), int(rng.integers(8, 64))
            target_ms = (15.0 + 0.5 * (verified + prompt)) / speed
            target_ms *= rng.lognormal(0, 0.03)
            cost.observe(
                StepTiming(9, verified, prompt, 800, 0, target_ms, 0.0, 0.0, 1.0)
            )

    cost.fit_profile(CostProfile((1, 512), (15.5, 271.0)))
    serve(200, speed=1.0)
    before = float(cost.target.predict(20.0))
    marginal = before - float(cost.target.predict(10.0))
    assert before == pytest.approx(25.0, rel=0.2)
    serve(50, speed=0.5)
    after = float(cost.target.predict(20.0))
    assert after > 1.6 * before
    assert after - float(cost.target.predict(10.0)) > 1.6 * marginal


@pytest.mark.parametrize(
    ("factor", "constant_ms"), [(1.0, 380.0), (8.0, 0.0)], ids=["constant", "multiple"]
)
def test_what_a_token_costs_beside_a_neighbour_is_learnt(factor, constant_ms):
    """A lost core delays every pass or slows every token; 50 steps tell which.

    The one taken for the other would be seven times off.
    """
    rng = np.random.default_rng(5)
    table = CostTable(256, first_ms=20.0, per_unit_ms=0.5)
    table.fit_profile([1, 64, 256], [40.0, 120.0, 360.0])

    def run(count: int) -> float:
        return float(np.interp(count, [1, 64, 256], [40.0, 120.0, 360.0]))

    for step in range(400):
        count = int(rng.integers(4, 33))
        price = run(count)
        if step >= 350:
            price = factor * price + constant_ms
        table.observe(count, price * rng.lognormal(0.0, 0.05))
    ratio = (table.at(60) - table.at(4)) / (factor * (run(60) - run(4)))
    assert 0.4 < ratio < 2.5
    assert table.at(18) == pytest.approx(factor * run(18) + constant_ms, rel=0.1)
    for _ in range(20):
        count = int(rng.integers(4, 33))
        table.observe(count, run(count) * rng.lognormal(0.0, 0.05))
    for count in (4, 18, 60):
        assert table.at(count) == pytest.approx(run(count), rel=0.1)


def test_a_sudden_slowdown_is_not_taken_for_the_price_of_context():
    cost = StepCost(max_tokens=256, max_reqs=64)
    cost.fit_profile(CostProfile((1, 256), (12.5, 140.0)))
    rng = np.random.default_rng(3)
    for step in range(400):
        # Well above the usual for a while when the core is lost.
        context = 6400 if step < 250 else 6800 + step % 7
        speed = 1.0 if step < 300 else 0.5
        target_ms = 20.0 / speed * rng.lognormal(0, 0.03)
        cost.observe(StepTiming(16, 16, 0, context, 0, target_ms, 0.0, 0.0, 1.0))
    # 20 ms over 400 positions would be .05.
    assert cost.target.slope_ms < 0.002
    assert float(cost.target.predict(16.0)) == pytest.approx(40.0, rel=0.15)


def test_no_step_is_free_however_steep_context_looks():
    cost = StepCost(max_tokens=256, max_reqs=64)
    rng = np.random.default_rng(4)
    for _ in range(200):
        context = int(rng.integers(5000, 9000))
        cost.observe(
            StepTiming(16, 16, 0, context, 0, 2.0 + 0.01 * context, 0.0, 0.0, 1.0)
        )
    assert cost.target.slope_ms == pytest.approx(0.01, rel=0.2)
    sizes = np.arange(1.0, 65.0)
    assert (cost.batch_ms(sizes, 440.0) > 0.2 * cost.target.predict(1.0)).all()


def test_longer_contexts_cost_more_once_seen():
    cost = StepCost(max_tokens=256, max_reqs=64)
    rng = np.random.default_rng(5)
    for step in range(600):
        context = 800 + (8000 if (step // 40) % 2 else 0)
        target_ms = (20 + 0.002 * context) * rng.lognormal(0, 0.01)
        cost.observe(StepTiming(8, 8, 0, context, 0, target_ms, 0.0, 0.0, 1.0))
    assert cost.target.slope_ms == pytest.approx(0.002, rel=0.2)
    assert cost.context_ms(8800) - cost.context_ms(800) == pytest.approx(16, rel=0.2)


def test_a_token_of_a_prompt_costs_what_any_token_costs():
    cost = StepCost(max_tokens=512, max_reqs=64)
    plain, mixed = (
        StepTiming(9, decode, prompt, 800, 0, 50.0, 0.0, 0.0, 1.0)
        for decode, prompt in ((136, 0), (8, 128))
    )
    assert cost.predict_ms(plain) == cost.predict_ms(mixed)
    for _ in range(200):
        cost.observe(mixed)
    assert cost.target.at(136) == pytest.approx(50.0, rel=0.05)


def test_growing_contexts_do_not_take_the_price_of_tokens():
    """A load that fills up: more requests, longer contexts and more drafts at once."""
    rng = np.random.default_rng(11)

    def measure(num_tokens: float, num_context: float) -> float:
        exact = 30.0 + 1.3 * num_tokens + 0.003 * num_context
        return float(exact * rng.lognormal(0, 0.1))

    cost = StepCost(max_tokens=2048, max_reqs=64)
    counts = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    cost.fit_profile(CostProfile(counts, tuple(30.0 + 1.3 * n for n in counts)))
    for load in (2, 8, 32, 4, 32, 32):
        for step in range(60):
            num_reqs = min(load, 1 + step // 2)
            context = num_reqs * (30 + 2 * min(step, 20) + int(rng.integers(0, 20)))
            decode = num_reqs + int(rng.integers(3, 6)) * num_reqs
            prompt = 30 * int(rng.integers(0, 3))
            target_ms = measure(decode + prompt, context)
            cost.observe(
                StepTiming(
                    num_reqs, decode, prompt, context, 0, target_ms, 0.0, 0.0, 1.0
                )
            )
    price = (cost.target.at(192) - cost.target.at(64)) / 128
    assert price == pytest.approx(1.3, rel=0.25)
    assert cost.context_ms(2000) < 25.0


def test_a_start_up_profile_replaces_the_priors():
    cost = StepCost(max_tokens=256, max_reqs=64)
    cost.fit_profile(CostProfile((1, 16, 64), (8.0, 10.0, 30.0), (1.0, 1.5, 2.0)))
    assert float(cost.target.predict(16.0)) == pytest.approx(10)
    assert float(cost.draft_next_ms(16, 2)) == pytest.approx(1.5)
    cost.fit_profile(CostProfile((), ()))  # An empty one changes nothing.
    assert float(cost.target.predict(16.0)) == pytest.approx(10)


def test_exported_costs_predict_the_same_elsewhere():
    cost = StepCost(max_tokens=256, max_reqs=64)
    learn(cost, np.random.default_rng(6), 200)
    copy = StepCost(max_tokens=256, max_reqs=64)
    copy.import_state(cost.export_state())
    timing = make_timing(np.random.default_rng(7))
    assert copy.predict_ms(timing) == pytest.approx(cost.predict_ms(timing))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_impossible_times_are_ignored(bad: float):
    table = CostTable(8, first_ms=5, per_unit_ms=1)
    before = table.export_state()
    assert table.observe(4, bad) == 1.0
    assert table.export_state() == before


def test_a_drafter_without_passes_is_free_until_it_is_measured():
    cost = StepCost(max_tokens=256, max_reqs=64)
    cost.fit_profile(CostProfile((1, 16, 64), (8.0, 10.0, 30.0)))

    def draft_ms() -> tuple[float, float]:
        return cost.draft_first.at(16), float(cost.draft_next_ms(8, 4))

    assert max(draft_ms()) < 0.01
    for _ in range(100):
        # The target slows down by half, which says nothing about look-ups.
        cost.observe(StepTiming(8, 16, 0, 800, 4, 15.0, 0.0, 0.0, 1.0))
    assert max(draft_ms()) < 0.01
    for _ in range(100):
        cost.observe(StepTiming(8, 16, 0, 800, 4, 15.0, 0.5, 0.0, 1.0))
    first_ms, next_ms = draft_ms()
    assert first_ms == pytest.approx(0.5, rel=0.1)
    assert next_ms < 0.01
    assert cost.prediction_error() < 0.05


def test_a_draft_made_in_one_pass_costs_the_same_at_any_depth():
    cost = StepCost(max_tokens=256, max_reqs=64)
    cost.fit_profile(
        CostProfile((1, 64), (8.0, 30.0), (1.0, 2.0), drafts_in_one_pass=True)
    )
    assert cost.draft_first.at(1) == pytest.approx(1.0)
    for _ in range(100):
        cost.observe(StepTiming(8, 40, 0, 800, 4, 20.0, 1.5, 0.0, 1.0))
    assert cost.draft_first.at(40) == pytest.approx(1.5, rel=0.05)
    assert float(cost.draft_next_ms(8, 4)) < 0.01


def test_a_larger_engine_prices_large_steps_as_the_smaller_one_would():
    cost = StepCost(max_tokens=256, max_reqs=64)
    learn(cost, np.random.default_rng(8), 200)
    larger = StepCost(max_tokens=2048, max_reqs=128)
    larger.import_state(cost.export_state())
    counts = np.array([10.0, 200.0, 250.0, 256.0, 700.0, 2048.0])
    expected = cost.target.predict(counts)
    assert larger.target.predict(counts) == pytest.approx(expected, rel=0.01)
    assert larger.host.at(128) > 1.2 * larger.host.at(64)
    assert larger.target.at(2048) > 4 * larger.target.at(256)


@pytest.mark.parametrize("padded_sizes", [(), (8, 16, 32)])
def test_a_range_of_counts_is_priced_like_each_of_them(padded_sizes):
    rng = np.random.default_rng(4)
    table = CostTable(64, first_ms=20.0, per_unit_ms=0.5, padded_sizes=padded_sizes)
    for count in rng.integers(1, 65, 40):
        table.observe(int(count), 10.0 + 0.3 * float(count))

    prices = np.ones(30)
    table.add_range(prices, 5)

    assert prices == pytest.approx(1.0 + table.predict(np.arange(5.0, 35.0)))


def test_steps_learnt_together_teach_what_they_teach_one_by_one():
    rng = np.random.default_rng(3)
    timings = [make_timing(rng) for _ in range(40)]
    together, alone = StepCost(512, 64), StepCost(512, 64)

    for first in range(0, 40, 4):
        together.learn(timings[first : first + 4])
    for timing in timings:
        alone.observe(timing)

    assert together.num_steps == alone.num_steps == 40
    for timing in timings:
        assert together.predict_ms(timing) == pytest.approx(alone.predict_ms(timing))


def test_what_did_not_run_follows_a_shift_that_ends_before_anybody_reads_prices():
    table = CostTable(64, first_ms=20.0, per_unit_ms=0.5)
    for _ in range(50):
        table.observe(8, 20.0)

    # Up by a hundred, in part as a constant, and back: nothing is read in between.
    factors = [table.observe(8, ms) for ms in (2000.0,) * 3 + (20.0,) * 4]

    assert all(factor > 0.0 for factor in factors)
    assert max(factors) > 2.0
    assert float(table.predict(8.0)) == pytest.approx(20.0, rel=0.2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("part", ["target_ms", "draft_next_ms", "host_ms"])
def test_a_step_that_no_clock_can_have_measured_is_dropped_and_counted(
    part: str, bad: float
):
    cost, untouched = StepCost(256, 64), StepCost(256, 64)
    timing = make_timing(np.random.default_rng(1))
    for one in (cost, untouched):
        one.observe(timing)

    cost.observe(replace(timing, **{part: bad}))
    cost.learn([replace(timing, **{part: bad}), timing])
    untouched.learn([timing])

    assert cost.report() == untouched.report() | {"num_dropped_timings": 2}
    assert cost.export_state() == untouched.export_state()
    assert cost.num_steps == untouched.num_steps == 2


def test_the_prompts_of_a_step_are_expected_as_recent_steps_had_them():
    cost = StepCost(256, 64)
    timing = make_timing(np.random.default_rng(1))
    for step in range(400):
        cost.observe(replace(timing, num_prefill_tokens=100 if step % 4 == 0 else 0))
    assert cost.usual_prefill_tokens == pytest.approx(25, rel=0.1)
    cost.note_skipped_steps(200)
    assert cost.usual_prefill_tokens < 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_profile_that_no_clock_can_have_measured_is_dropped_and_counted(bad: float):
    cost, untouched = StepCost(256, 64), StepCost(256, 64)
    cost.fit_profile(CostProfile((1, 16), (8.0, bad), (1.0, 1.5)))
    cost.fit_profile(CostProfile((1, 16), (8.0, 9.0), (bad, 1.5)))
    assert cost.num_dropped_timings == 2
    assert cost.export_state() == untouched.export_state()
