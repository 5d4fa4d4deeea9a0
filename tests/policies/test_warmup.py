"""Whether the warm-up leaves nothing to compile while requests wait."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from policies.decisions.select import select_drafts
from policies.registry import POLICY_NAMES, build_planner
from policies.types import DraftBatch, EngineLimits, PolicySpec
from policies.warmup import warm_up
from tests.policies.made_up import MAX_DEPTH, MadeUpEngine
from tests.policies.made_up_steps import MadeUpStep


def count_compiled() -> dict[str, int]:
    """Count for each compiled function for how many kinds of arguments it was."""
    return {
        f"{name}.{attribute}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("policies.")
        for attribute, value in vars(module).items()
        if hasattr(value, "signatures")
    }


@pytest.mark.parametrize("policy", sorted(set(POLICY_NAMES) - {"none"}))
@pytest.mark.parametrize("padded_sizes", [(), (1, 2, 4, 8, 16, 32, 64)])
def test_nothing_is_left_to_compile(policy: str, padded_sizes: tuple[int, ...]):
    spec = PolicySpec(policy, MAX_DEPTH - 1, max_draft_tokens=MAX_DEPTH)
    limits = EngineLimits(
        512, 64, skips_drafter=True, exits_early=True, padded_sizes=padded_sizes
    )
    warm_up(spec, limits)
    before = count_compiled()
    assert sum(before.values()) > 0

    for sampled in (False, True):
        planner = build_planner(spec, limits)
        MadeUpEngine(6).run(planner, 100, sampled=sampled)
    for has_classes in (False, True):
        planner, timing = build_planner(spec, limits), None
        rng = np.random.default_rng(0)
        for number in range(250):
            num_reqs, depth = 5 - number % 2, spec.max_depth
            step = MadeUpStep(rng, num_reqs, depth, has_classes=has_classes)
            timing = step.time(step.run(planner, timing))
    planner.import_state(planner.export_state())
    for num_decodes in (3, 4):
        planner.select(DraftBatch(np.array([2, 0, 1]), None, num_decodes=num_decodes))
        planner.choose_depth(3)
    select_drafts(np.full((3, 2), 0.5, dtype=np.float32), np.array([2, 0, 1]), 2)
    assert count_compiled() == before
