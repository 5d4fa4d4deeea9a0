"""What `fixed` and `tetris` decide, and which planners cannot be built."""

from __future__ import annotations

import numpy as np
import pytest

from policies.planner import Planner
from policies.registry import build_planner
from policies.types import DraftBatch, PolicySpec, VerificationOutcome

FALLING = [0.9, 0.8, 0.7, 0.6]


def make_planner(name: str, draft_tokens: int = 2, most: int = 4) -> Planner:
    return build_planner(PolicySpec(name, draft_tokens, max_draft_tokens=most))


@pytest.mark.parametrize(("name", "depth"), [("fixed", 3), ("tetris", 8)])
def test_tetris_drafts_deeper_than_it_verifies_and_fixed_does_not(
    name: str, depth: int
):
    planner = make_planner(name, draft_tokens=3, most=8)
    assert [planner.choose_depth(n) for n in (0, 1, 64)] == [depth] * 3
    assert PolicySpec(name, 3, max_draft_tokens=8).max_depth == depth


@pytest.mark.parametrize(
    ("name", "lengths", "confidence", "admitted"),
    [
        ("fixed", [2, 0, 1], None, [2, 0, 1]),
        # Survival: .9 .81 .729 .656 | .1 .09 .081 .073 | .5 .25 .125 .0625; six places.
        ("tetris", [4, 4, 4], [[0.9] * 4, [0.1, 0.9, 0.9, 0.9], [0.5] * 4], [4, 0, 2]),
        # Requests without drafts add nothing to the budget.
        ("tetris", [4, 0, 0], [FALLING, [0.0] * 4, [0.0] * 4], [2, 0, 0]),
        # An ngram request that found one match frees its second place.
        ("tetris", [1, 4], None, [1, 3]),
        # Without confidence shallow positions come first.
        ("tetris", [4, 4, 4], None, [2, 2, 2]),
    ],
)
def test_tetris_spends_what_fixed_would_where_survival_is_largest(
    name: str,
    lengths: list[int],
    confidence: list[list[float]] | None,
    admitted: list[int],
):
    given = None if confidence is None else np.array(confidence)
    selection = make_planner(name).select(DraftBatch(np.array(lengths), given))
    assert selection.num_admitted.tolist() == admitted
    assert selection.draft_budget == sum(admitted)


def test_confidence_wins_over_what_was_learnt():
    planner = make_planner("tetris", draft_tokens=1, most=2)
    for _ in range(50):
        planner.observe(VerificationOutcome(np.array([2]), np.array([0])))
    batch = DraftBatch(np.array([2, 2]), np.array([[0.2, 0.2], [0.9, 0.9]]))
    assert planner.select(batch).num_admitted.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PolicySpec("fixed", 0), "draft_tokens must be >= 1, got 0"),
        (PolicySpec("goodput"), "max_draft_tokens must be >= 1, got 0"),
        (PolicySpec("tetris", 2, max_draft_tokens=1), "tokens must be >= 2, got 1"),
        (
            PolicySpec("oracle", max_draft_tokens=2),
            r"'oracle' has no planner; .*'fixed', .*'tetris'",
        ),
        (PolicySpec("none", max_draft_tokens=2), "'none' has no planner"),
        (PolicySpec("fixed", 4, params={"cut": 1}), "takes no params"),
        (PolicySpec("my_policies", max_draft_tokens=4), "name a class as module:Class"),
    ],
)
def test_unknown_names_and_numbers_are_refused_by_value(spec: PolicySpec, message: str):
    with pytest.raises(ValueError, match=message):
        build_planner(spec)
