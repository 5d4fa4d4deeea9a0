"""The conformance test that is published for other people's planners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from policies.planner import Planner
from policies.registry import POLICY_NAMES, build_planner
from policies.testing import check_planner
from policies.types import DraftBatch, DraftSelection, EngineLimits, PolicySpec

DEPTH = 4


@pytest.mark.parametrize("policy", sorted(set(POLICY_NAMES) - {"none"}))
def test_our_own_planners_keep_the_contract(policy: str) -> None:
    spec = PolicySpec(policy, DEPTH, max_draft_tokens=DEPTH)
    check_planner(lambda limits: build_planner(spec, limits), DEPTH)


@dataclass
class Threshold(Planner):
    """Verify while survival is above a threshold, with one fault or none."""

    max_depth: int
    limits: EngineLimits
    fault: str = ""

    def select(self, batch: DraftBatch) -> DraftSelection:
        if batch.confidence is None:
            admitted = np.minimum(batch.num_draft_tokens, 1)
            return DraftSelection(admitted, int(admitted.sum()))
        confidence = np.nan_to_num(batch.confidence)
        if self.fault == "looks ahead":
            confidence = np.broadcast_to(
                confidence.mean(axis=1, keepdims=True), confidence.shape
            )
        admitted = (confidence.cumprod(axis=1) > 0.3).sum(axis=1)
        if self.fault != "too many":
            admitted = np.minimum(admitted, batch.num_draft_tokens)
        if self.fault == "changes the batch":
            batch.num_draft_tokens[:] = admitted
        if self.fault == "nan" and np.isnan(batch.confidence).any():
            raise FloatingPointError("a confidence is not a number")
        budget = 0 if self.fault == "budget" else int(admitted.sum())
        return DraftSelection(admitted, budget)

    def choose_depth(
        self, num_reqs: int, latency_target_ms: float | None = None
    ) -> int:
        return self.max_depth + (self.fault == "too deep")

    def observe(self, outcome: object) -> None:
        if self.fault == "dies of nothing verified":
            assert outcome.num_verified.any()

    def export_state(self) -> dict[str, object]:
        return {"x": np.zeros(2)} if self.fault == "exports arrays" else {"x": 1.0}


def check(fault: str) -> None:
    check_planner(lambda limits: Threshold(DEPTH, limits, fault), DEPTH)


def test_a_sound_planner_of_somebody_else_passes() -> None:
    check("")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("looks ahead", "depends on its confidences after it"),
        ("too many", "admitted .* drafts"),
        ("changes the batch", "select changed the batch"),
        ("budget", "draft_budget 0 is below"),
        ("too deep", r"depth 5 is not within 0\.\.4"),
    ],
)
def test_each_broken_rule_is_named(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(fault)


def test_unusable_confidences_and_states_are_found() -> None:
    with pytest.raises(FloatingPointError):
        check("nan")
    with pytest.raises(TypeError):
        check("exports arrays")
