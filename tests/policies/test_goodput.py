"""The goodput planner against a made-up engine whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.baselines import DynamicPlanner, FixedPlanner, TetrisPlanner
from policies.decisions.batching import EngineLoad
from policies.goodput import LEARN_EVERY, GoodputPlanner
from policies.planner import Planner
from policies.registry import build_planner
from policies.types import (
    CostProfile,
    DraftBatch,
    EngineLimits,
    PolicySpec,
    VerificationOutcome,
)
from tests.policies.made_up import (
    LIMITS,
    MAX_DEPTH,
    MadeUpEngine,
    make_goodput,
    outcome_of,
)


class NoSpeculation(FixedPlanner):
    """`none`, as far as this engine can tell."""

    def choose_depth(self, num_reqs: int) -> int:
        return 0


@pytest.mark.parametrize("num_reqs", [1, 4, 16, 48])
def test_it_keeps_up_with_the_best_constant_policy_at_every_load(num_reqs: int):
    rivals: list[Planner] = [
        NoSpeculation(1),
        *(FixedPlanner(k) for k in range(1, MAX_DEPTH + 1)),
        TetrisPlanner(1, 2),
        TetrisPlanner(2, 3),
    ]
    best = max(MadeUpEngine(num_reqs).run(rival, 600) for rival in rivals)
    engine, planner = MadeUpEngine(num_reqs), make_goodput()
    engine.run(planner, 100)  # Learning.
    assert engine.run(planner, 500) > 0.98 * best


def test_sampled_drafts_do_about_as_well():
    argmax = MadeUpEngine(16).run(make_goodput(), 500)
    sampled = MadeUpEngine(16).run(make_goodput(), 500, sampled=True)
    assert sampled > 0.97 * argmax


def test_sampled_drafts_are_admitted_by_what_was_known_before_them():
    planner = make_goodput()
    MadeUpEngine(16).run(planner, 200, sampled=True)
    rng = np.random.default_rng(3)
    confidence = rng.uniform(0.3, 0.99, (6, 3))

    def admit(changed: np.ndarray) -> np.ndarray:
        batch = DraftBatch(
            num_draft_tokens=np.full(6, 3),
            confidence=changed,
            req_ids=tuple("abcdef"),
            num_decodes=6,
            drafts_are_sampled=True,
        )
        return planner.select(batch).num_admitted

    before = admit(confidence)
    for position in range(3):
        changed = confidence.copy()
        changed[:, position:] = rng.uniform(0.01, 0.999, (6, 3 - position))
        # What is decided about the positions before is not touched by these.
        np.testing.assert_array_equal(
            np.minimum(admit(changed), position), np.minimum(before, position)
        )


def test_clock_readings_of_the_drafting_step_do_not_decide_about_its_drafts():
    planner = make_goodput()
    engine = MadeUpEngine(8)
    engine.run(planner, 100)
    before = planner.cost.export_state()
    planner.observe_timing(engine.time(0, 2))
    assert planner.cost.export_state() == before
    for _ in range(LEARN_EVERY):
        planner.observe(VerificationOutcome(np.array([1]), np.array([1]), ("0",)))
    assert planner.cost.export_state() != before


def test_a_malformed_timing_is_lost_and_the_next_ones_are_learnt_from():
    planner = make_goodput()
    engine = MadeUpEngine(8)
    engine.run(planner, 101)
    num_steps = planner.cost.num_steps
    for _ in range(LEARN_EVERY):
        planner.observe_timing(replace(engine.time(0, 2), num_context_tokens=None))
    with pytest.raises(TypeError):
        planner.observe(VerificationOutcome(np.array([1]), np.array([1]), ("0",)))

    engine.run(planner, 100)

    assert planner.cost.num_steps > num_steps + 90
    assert len(planner.cost._noted) <= LEARN_EVERY


def test_it_drafts_again_when_the_load_falls():
    planner = make_goodput()
    MadeUpEngine(48, token_ms=5.0).run(planner, 300)
    assert planner.plan.depth == 0
    light = MadeUpEngine(1)
    light.run(planner, 60)
    assert planner.plan.depth >= 1


def test_it_is_back_at_the_best_arm_within_fifty_steps_of_a_stolen_core():
    engine, planner = MadeUpEngine(16), make_goodput()
    engine.run(planner, 300)
    engine.speed = 2.0
    engine.run(planner, 50)
    start = engine.step
    ours = engine.run(planner, 200)
    best = 0.0
    for rival in (NoSpeculation(1), FixedPlanner(1), FixedPlanner(2)):
        other = MadeUpEngine(16)
        other.speed, other.step = 2.0, start
        best = max(best, other.run(rival, 200))
    assert ours > 0.98 * best


def test_the_latency_target_holds_once_costs_are_known():
    engine = MadeUpEngine(8)
    free, bound = make_goodput(), make_goodput(latency_target_ms=24.0)
    engine.run(free, 200)
    assert max(engine.time(8, free.plan.depth).total_ms, 25) > 24.0
    engine.run(bound, 200)
    slow = 0
    for step in range(100):
        confidence, _, _ = engine.draw(step)
        depth = bound.choose_depth(8)
        num_verified = 0
        if depth:
            batch = DraftBatch(
                np.full(8, depth), confidence[:, :depth], tuple("01234567"), 8
            )
            num_verified = bound.select(batch).num_admitted.sum()
        slow += engine.time(num_verified, depth).total_ms > 1.05 * 24.0
    assert slow <= 5


def test_the_batch_plan_holds_all_limits():
    planner = make_goodput(latency_target_ms=40.0)
    MadeUpEngine(16).run(planner, 200)
    load = EngineLoad(16, 16, 1600, np.full(16, 100), 16)
    plan = planner.plan_batch(load)
    # 1 + 13 + .85 n <= 40.
    assert plan.max_running == pytest.approx(30, abs=3)
    assert plan.max_prefill_tokens < LIMITS.max_tokens
    assert plan.reserved_blocks == 50


def test_drafts_without_confidence_are_judged_by_position():
    planner = make_goodput()
    batch = DraftBatch(np.array([3, 1, 0]), None, tuple("abc"), 3)
    assert planner.select(batch).num_admitted.shape == (3,)
    assert "calibration_error" not in planner.report()


def test_what_was_learnt_by_position_reaches_a_new_replica():
    teacher, pupil = make_goodput(), make_goodput()
    batch = DraftBatch(np.array([3]), None, ("a",), 1)
    timing = MadeUpEngine(1).time(3, 3)
    for _ in range(200):
        teacher.select(batch)
        teacher.observe(VerificationOutcome(np.array([3]), np.array([3]), ("a",)))
        teacher.observe_timing(timing)
    pupil.import_state(teacher.export_state())
    expected = teacher.select(batch).expected_accepted
    assert expected > 1.5
    assert pupil.select(batch).expected_accepted == pytest.approx(expected)


def test_an_empty_batch_is_no_trouble():
    empty = DraftBatch(np.zeros(0, dtype=np.int64), np.zeros((0, 0)))
    assert make_goodput().select(empty).num_admitted.size == 0


def test_a_new_replica_starts_from_what_another_learnt():
    teacher = make_goodput()
    engine = MadeUpEngine(16)
    engine.run(teacher, 300)
    pupil = make_goodput()
    pupil.import_state(teacher.export_state())
    timing = engine.time(8, 2)
    assert pupil.cost.predict_ms(timing) == pytest.approx(timing.total_ms, rel=0.05)


def test_a_start_up_profile_does_not_undo_a_warm_start():
    teacher, pupil = make_goodput(), make_goodput()
    MadeUpEngine(16).run(teacher, 300)
    pupil.import_state(teacher.export_state())
    before = pupil.cost.export_state()
    pupil.fit_profile(CostProfile((1, 8), (900.0, 950.0), (400.0, 400.0)))
    assert pupil.cost.export_state() == before


def test_a_novice_has_nothing_to_teach():
    novice = make_goodput()
    MadeUpEngine(4).run(novice, 10)
    assert novice.export_state() == {}
    learner = make_goodput()
    before = learner.cost.export_state()
    learner.import_state({})
    assert learner.cost.export_state() == before


def test_finished_requests_leave_nothing_behind():
    planner = make_goodput()
    MadeUpEngine(16).run(planner, 50)
    for index in range(16):
        planner.forget(str(index))
    assert len(planner.acceptance.calibration._requests) == 0


def test_a_request_that_ended_before_its_last_outcome_was_learnt_is_forgotten():
    planner = make_goodput()
    planner.observe(outcome_of("0", 0.5, 1))
    planner.forget("0")
    for _ in range(LEARN_EVERY):
        planner.observe(outcome_of("1", 0.5, 1))
    assert len(planner.acceptance.calibration._requests) == 1


def test_an_outcome_with_its_own_confidence_is_learnt_by_that_one():
    """An engine that selects before it knows the drafts reports them afterwards."""
    planner = make_goodput()
    for _ in range(100 * LEARN_EVERY):
        planner.select(
            DraftBatch(
                num_draft_tokens=np.array([2, 2]),
                confidence=np.full((2, 2), 0.5),
                req_ids=("0", "1"),
            )
        )
        planner.observe(
            VerificationOutcome(
                num_verified=np.array([2, 2]),
                num_accepted=np.array([2, 0]),
                req_ids=("new", "newer"),
                confidence=np.array([[0.95, 0.95], [0.05, 0.05]]),
            )
        )
    sure, unsure = planner.acceptance.calibration.predict(
        np.array([[0.95], [0.05]]), ["a", "b"]
    )
    assert sure[0] > 0.9
    assert unsure[0] < 0.1


def test_the_scale_holds_all_that_acceptance_is_predicted_from():
    planner = make_goodput()
    MadeUpEngine(4).run(planner, 60)
    req_ids = ["2", "unknown"]
    scale = planner.acceptance_scale(req_ids)
    confidence = np.array([[0.3, 0.9], [0.6, 0.99999]])
    odds = np.log(confidence / (1 - confidence)).clip(-8, 8)
    assert scale.max_log_odds == 8
    odds = scale.slope * odds + scale.intercept[:2] + scale.effect[:, None]
    expected = planner.acceptance.calibration.predict(confidence, req_ids)
    np.testing.assert_allclose(1 / (1 + np.exp(-odds)), expected)


@pytest.mark.parametrize("num_prefill_tokens", [0, 64, 256])
def test_the_goodput_it_expects_is_what_comes_where_prompts_fill_the_steps(
    num_prefill_tokens: int,
):
    planner = make_goodput()
    engine = MadeUpEngine(8, num_prefill_tokens=num_prefill_tokens)
    planner.fit_profile(engine.profile())
    engine.run(planner, 200)
    measured = engine.run(planner, 200)
    assert planner.report()["expected_goodput_per_s"] == pytest.approx(
        measured, rel=0.1
    )


def test_prompts_that_fill_what_a_target_leaves_do_not_end_drafting():
    alone, beside_prompts = (make_goodput(latency_target_ms=35.0) for _ in range(2))
    for planner, num_prefill_tokens in ((alone, 0), (beside_prompts, 16)):
        engine = MadeUpEngine(8, num_prefill_tokens=num_prefill_tokens)
        planner.fit_profile(engine.profile())
        engine.run(planner, 200)
    assert alone.plan.depth > 0
    assert beside_prompts.plan.depth >= alone.plan.depth
    assert beside_prompts.plan.budget_per_req > 0.9 * alone.plan.budget_per_req


def test_reports_name_what_operators_look_for():
    planner = make_goodput()
    MadeUpEngine(4).run(planner, 50)
    report = planner.report()
    assert report["measured_step_ms"] > 0
    assert 0 <= report["step_time_error"] < 1
    assert 0 <= report["calibration_error"] < 1


@pytest.mark.parametrize(("num_reqs", "token_ms"), [(1, 0.85), (48, 5.0)])
def test_dynamic_finds_the_best_single_length(num_reqs: int, token_ms: float):
    planner = DynamicPlanner(MAX_DEPTH, LIMITS)
    engine = MadeUpEngine(num_reqs, token_ms=token_ms)
    engine.run(planner, 100)
    ours = engine.run(planner, 400)
    rivals = [NoSpeculation(1), *(FixedPlanner(k) for k in range(1, MAX_DEPTH + 1))]
    best = max(
        MadeUpEngine(num_reqs, token_ms=token_ms).run(rival, 500) for rival in rivals
    )
    assert ours > 0.93 * best


@pytest.mark.parametrize("name", ["fixed", "tetris", "dynamic", "goodput"])
def test_every_policy_answers_the_whole_protocol(name: str):
    planner = build_planner(PolicySpec(name, 2, max_draft_tokens=3), LIMITS)
    MadeUpEngine(4).run(planner, 120)
    planner.forget("0")
    assert isinstance(planner.report(), dict)
    build_planner(PolicySpec(name, 2, max_draft_tokens=3), LIMITS).import_state(
        planner.export_state()
    )


def test_a_novice_drafts_no_deeper_than_its_plan_while_nothing_ends_the_draft():
    limits = EngineLimits(max_tokens=512, max_reqs=64, exits_early=True)
    planner = GoodputPlanner.build(MAX_DEPTH, limits)
    assert planner.choose_depth(4) == planner.plan.depth < MAX_DEPTH
    assert planner.early_exit(tuple("abcd")) is None


def test_the_latency_target_limits_sampled_drafts_too():
    """A target lowers the price of a draft; the threshold must not fall with it."""
    engine = MadeUpEngine(8)
    free, bound = make_goodput(), make_goodput(latency_target_ms=24.0)
    engine.run(free, 200, sampled=True)
    engine.run(bound, 200, sampled=True)
    times_ms, num_late = [], 0
    for step in range(200):
        confidence, _, _ = engine.draw(step)
        depth = bound.choose_depth(8)
        if not depth:
            continue
        batch = DraftBatch(
            np.full(8, depth),
            confidence[:, :depth],
            tuple("01234567"),
            8,
            drafts_are_sampled=True,
        )
        selection = bound.select(batch)
        num_late += selection.num_cut_by_latency
        verified = int(selection.num_admitted.sum())
        times_ms.append(engine.time(verified, depth).total_ms)
    assert np.mean(times_ms) < 1.02 * 24.0
    assert num_late > 0
