"""Recorded drafts, what is known of them, and the decisions that follow."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from loadtest.simulate import state
from loadtest.simulate.bounds import find_bounds, play
from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import load_engine
from loadtest.simulate.fleet import make_fleet, run_fleet
from loadtest.simulate.planned import make_planners
from loadtest.simulate.recorded import calibrate, read_folder, split_by_ease
from loadtest.simulate.selection import PLAN_EVERY, drafter_ms, select, target_ms
from loadtest.simulate.show import BOUNDS, FOLDER
from policies.decisions.budget import find_budget, survival_threshold
from policies.decisions.depth import DepthPlan, plan_depth
from policies.decisions.early_exit import EarlyExitRule
from policies.decisions.recent_drafts import RecentDrafts
from policies.decisions.select import select_drafts
from policies.depth_control import KEEP_DEPTH_GAIN
from policies.types import AcceptanceScale

DEPTH, NUM_REQS = 4, 6


def made_up(num_blocks: int, seed: int = 0) -> state.Drafts:
    rng = np.random.default_rng(seed)
    acceptance = rng.uniform(0.2, 1.0, (num_blocks, DEPTH))
    accepted = (rng.random(acceptance.shape) < acceptance).cumprod(axis=1).sum(axis=1)
    return state.Drafts(
        survival=acceptance.cumprod(axis=1),
        confidence=acceptance,
        num_offered=np.full(num_blocks, DEPTH),
        num_accepted=accepted,
        first=np.array([0, num_blocks]),
    )


@pytest.mark.parametrize("cell", ["mixed-t0-c16", "mixed-t1-c1"])
def test_bounds_are_those_of_recorded_steps_played_one_by_one(cell: str) -> None:
    """Within 2 % of what the planner itself and brute force made of them."""
    folder = FOLDER.parent / "ablations" / "drafts" / "list1" / cell
    rows = json.loads((FOLDER / "bounds-replay.json").read_text("utf-8"))
    (row,) = (r for r in rows if (r["list"], r["cell"]) == ("list1", cell))
    found = find_bounds(folder / "fixed-8.npz", int(cell.rpartition("c")[2]))
    best = max(found[f"fixed:{depth}"] for depth in range(1, 9))
    for name in BOUNDS:
        assert found[name] / best == pytest.approx(row[name], rel=0.02)


def test_replies_go_through_recorded_blocks_in_turn() -> None:
    drafts = made_up(37)
    engine = load_engine("cpu-demo-100m", DEPTH, 1, state.ALL, drafts)
    costs = engine.costs
    step_ms = costs.base_ms + costs.token_ms * (1 + DEPTH) + drafter_ms(costs, DEPTH, 1)
    tokens = 1.0 + drafts.num_accepted.mean()
    assert engine.tokens_per_step == pytest.approx(tokens)
    assert play(engine) == pytest.approx(1e3 * tokens / step_ms, rel=0.005)


def test_half_of_the_traces_are_easy() -> None:
    parts = [made_up(10, seed) for seed in range(4)]
    found = split_by_ease(parts)
    assert found.first.tolist() == [0, 20, 40]
    easy, hard = np.split(found.num_accepted, 2)
    assert easy.mean() > hard.mean()
    assert sorted(map(tuple, found.survival)) == sorted(
        tuple(row) for part in parts for row in part.survival
    )


def test_a_single_trace_is_easy_and_hard() -> None:
    found = read_folder(FOLDER.parent / "ablations/drafts/list1/mixed-t0-c1")
    assert np.diff(found.first).tolist() == 2 * [found.num_offered.size // 2]
    easy, hard = np.split(found.num_accepted, 2)
    np.testing.assert_array_equal(easy, hard)


def test_calibration_finds_the_truth_of_a_drafter_that_is_too_sure() -> None:
    rng = np.random.default_rng(0)
    count = 4000
    odds = rng.normal(1.5, 1.5, (count, DEPTH))
    owner = rng.integers(0, 40, count)
    effect = rng.normal(0.0, 0.5, 40)
    truth = 1 / (1 + np.exp(-(0.6 * odds - 0.4 + effect[owner][:, None])))
    happened = rng.random(truth.shape) < truth
    accepted = happened.cumprod(axis=1).sum(axis=1)
    confidence = 1 / (1 + np.exp(-odds))
    found = calibrate(confidence, np.full(count, DEPTH), accepted, owner)
    assert np.abs(found - truth).mean() < 0.03 < np.abs(confidence - truth).mean()


@pytest.mark.parametrize("seed", range(20))
def test_both_worlds_draft_and_verify_the_same(seed: int) -> None:
    """Depth, early end, budget and selection, by the code that engines call."""
    rng = np.random.default_rng(seed)
    drafts = made_up(40, seed)
    model = "h100-qwen3-1.7b" if seed % 2 else "cpu-demo-100m"
    engine = load_engine(model, DEPTH, NUM_REQS, state.WORTH, drafts)
    costs = engine.costs._replace(token_ms=(0.02, 0.3, 1.0)[seed % 3])
    nobody = Drawn(np.zeros(0), *np.zeros((3, 0), np.int64))
    fleet = make_fleet(replace(engine, costs=costs), nobody, 1, 0)
    fleet.num_running[0] = NUM_REQS
    fleet.slots.output[:] = 1000
    recent, plan, sample = RecentDrafts(DEPTH), None, np.empty(0)
    for step in range(2 * PLAN_EVERY + 1):
        blocks = rng.integers(0, 40, NUM_REQS)
        fleet.slots.block[0] = blocks
        survival = drafts.survival[blocks]
        select(fleet, 0)
        depth = int(fleet.depth[0])
        if plan is not None:
            expected = 0
            if plan.depth > 0:
                expected = draft(plan, drafts.confidence[blocks], costs, sample)
            assert depth == expected
            lengths = np.full(NUM_REQS, depth)
            ranked = -np.sort(-survival[:, :depth].ravel())
            step_ms = np.array(
                [target_ms(costs, NUM_REQS + n) for n in range(ranked.size + 1)]
            )
            budget, _ = find_budget(ranked, step_ms, plan.tokens_per_ms, np.inf)
            admitted = select_drafts(survival, lengths, budget)
            assert fleet.slots.drafts[0].tolist() == admitted.tolist()
        recent.remember(drafts.confidence[blocks], np.full(NUM_REQS, DEPTH), None)
        if step % PLAN_EVERY == 0:
            sample = recent.sample_acceptance()
            current = 1 if plan is None else plan.depth
            plan = replan(recent, costs, current)
            found = fleet.plan[0]
            assert found == pytest.approx(
                [plan.depth, plan.tokens_per_ms, plan.budget_per_req]
            )
            assert fleet.next_acceptance[0] == pytest.approx(sample)


def replan(recent: RecentDrafts, costs: state.Costs, current: int) -> DepthPlan:
    estimate = recent.estimate_depths(np.full(DEPTH, 0.5))
    step_ms = np.empty(estimate.verified.shape)
    for (depth, column), verified in np.ndenumerate(estimate.verified):
        num_tokens = NUM_REQS + round(NUM_REQS * verified)
        step_ms[depth, column] = (
            costs.base_ms
            + costs.request_ms * NUM_REQS
            + target_ms(costs, num_tokens)
            + drafter_ms(costs, depth, NUM_REQS)
        )
    return plan_depth(estimate, step_ms, NUM_REQS, current, keep_gain=KEEP_DEPTH_GAIN)


def draft(
    plan: DepthPlan, acceptance: state.Floats, costs: state.Costs, sample: state.Floats
) -> int:
    width = max(1, round(2.0 * plan.budget_per_req * NUM_REQS))
    ends_ms = np.array([target_ms(costs, NUM_REQS + more) for more in (0, width)])
    rule = EarlyExitRule(
        req_ids=tuple(range(NUM_REQS)),
        scale=AcceptanceScale(1.0, np.zeros(DEPTH), np.zeros(NUM_REQS), 8.0),
        max_depth=DEPTH,
        next_acceptance=sample,
        pass_price=plan.tokens_per_ms * drafter_ms(costs, 1, NUM_REQS),
        token_price=survival_threshold(ends_ms, width, plan.tokens_per_ms),
    )
    watch = rule.start(rule.req_ids)
    for depth in range(1, DEPTH):
        if not watch.should_continue(acceptance[:, depth - 1].tolist()):
            return depth
    return DEPTH


def test_the_planner_itself_decides_where_it_is_asked() -> None:
    """It learns to leave bad drafts out; all tokens come, and sooner."""
    drafts = made_up(200)
    bad = drafts._replace(num_accepted=np.minimum(drafts.num_accepted, 1))
    ones = np.ones(60, np.int64)
    drawn = Drawn(np.linspace(0.0, 0.1, 60), 20 * ones, 120 * ones, 0 * ones)
    finished = []
    for rule in (state.ALL, state.ASKED):
        engine = load_engine("cpu-demo-100m", DEPTH, NUM_REQS, rule, bad)
        asked = make_planners(engine, 2)
        run = run_fleet(engine, drawn, 2, "round-robin", 0.0, 0, decide=asked)
        assert (run.requests.num_finishes == 1).all()
        finished.append(run.requests.finish_s.max())
    assert finished[1] < 0.9 * finished[0]
