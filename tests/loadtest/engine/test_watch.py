"""What is noted between engine and planner, step by step."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadtest.engine.watch import Watch
from policies.goodput import GoodputPlanner
from policies.types import DraftBatch, EngineLimits, StepTiming, VerificationOutcome

TIMING = StepTiming(
    num_reqs=2,
    num_decode_tokens=4,
    num_prefill_tokens=0,
    num_context_tokens=50,
    depth=2,
    target_ms=9.0,
    draft_first_ms=0.0,
    draft_next_ms=0.0,
    host_ms=1.0,
)
NOTHING = VerificationOutcome(np.zeros(0, np.int64), np.zeros(0, np.int64))


@pytest.fixture
def watch() -> Watch:
    return Watch(GoodputPlanner.build(3, EngineLimits()))


def test_a_trace_keeps_what_was_offered_admitted_and_accepted(watch, tmp_path):
    watch.observe(NOTHING)
    watch.start_over()  # What the block before left behind is no part of it.
    confidence = np.array([[0.99, 0.98, 0.0], [0.4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch = DraftBatch(np.array([2, 1, 0]), confidence, ("a", "b", "c"), num_decodes=3)
    watch.mark("start")
    selection = watch.select(batch)
    assert watch.choose_depth(3) in range(4)
    # The scheduler cut the draft of b.
    one = np.array([1])
    watch.observe(VerificationOutcome(one, one, ("a",)))
    watch.observe_timing(TIMING)
    watch.mark("end")
    watch.observe(NOTHING)

    watch.save(tmp_path / "new" / "trace.npz")
    trace = np.load(tmp_path / "new" / "trace.npz")

    assert watch.add_up_stages() == {"score": 9.0, "verify": 0.0, "draft": 0.0}
    assert trace["step_target_ms"].tolist()[0] == 9.0
    assert trace["step_depth"].tolist()[0] == 2.0
    assert np.isnan(trace["step_target_ms"][1])
    assert trace["window"].tolist() == [0, 1]
    assert json.loads(str(trace["state"])) == json.loads(
        json.dumps(watch.export_state())
    )
    assert trace["draft_req"].tolist() == [0, 1]
    assert trace["draft_num_offered"].tolist() == [2, 1]
    admitted = selection.num_admitted[:2].tolist()
    assert trace["draft_num_admitted"].tolist() == admitted
    assert trace["draft_num_verified"].tolist() == [1, 0]
    assert trace["draft_num_accepted"].tolist() == [1, -1]
    np.testing.assert_allclose(
        trace["draft_confidence"], [[0.99, 0.98], [0.4, np.nan]], rtol=1e-6
    )


def test_confidence_that_comes_with_the_outcome_is_what_counts(tmp_path):
    planner: Any = SimpleNamespace(
        export_state=dict, select=lambda batch: None, observe=lambda outcome: None
    )
    watch = Watch(planner)
    watch.select(SimpleNamespace(confidence=np.full((1, 2), 0.1), req_ids=("b",)))
    counts = np.array([2]), np.array([1])
    watch.observe(VerificationOutcome(*counts, ("a",), np.array([[0.9, 0.8]])))

    watch.save(tmp_path / "trace.npz")
    trace = np.load(tmp_path / "trace.npz")

    assert trace["draft_confidence"] == pytest.approx(np.array([[0.9, 0.8]]))
    assert trace["draft_num_verified"].tolist() == [2]


def test_a_planner_without_drafts_leaves_a_trace_too(watch, tmp_path):
    watch.observe(NOTHING)
    watch.save(tmp_path / "trace.npz")
    trace = np.load(tmp_path / "trace.npz")
    assert trace["step_target_ms"].shape == (1,)
    assert trace["draft_step"].size == trace["draft_confidence"].size == 0


def test_a_planner_held_at_depth_0_plans_and_drafts_nothing():
    planner = GoodputPlanner.build(8, EngineLimits(skips_drafter=True))
    held = Watch(planner, hold_at_zero=True)

    depths = {held.choose_depth(4, None) for _ in range(200)}

    assert depths == {0}
    # It has planned, which is part of the price, and believes that it chose depth 0.
    assert planner.plan.tokens_per_ms > 0
    assert planner.plan.depth == 0
    assert held.report() == planner.report()
