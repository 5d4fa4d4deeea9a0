"""A few made-up steps, so that everything is compiled before the first real one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.batching import EngineLoad
from policies.decisions.select import blank_past, select_drafts
from policies.estimators.acceptance_watch import AcceptanceWatch
from policies.registry import build_planner
from policies.types import CostProfile, DraftBatch, StepTiming, VerificationOutcome

if TYPE_CHECKING:
    from policies.types import EngineLimits, PolicySpec

NUM_STEPS = 9
"""Enough for everything that is due every few steps (`depth_control.REPLAN_EVERY`)."""

TARGET_MS = 50.0


def warm_up(spec: PolicySpec, limits: EngineLimits) -> None:
    """Take a planner like the engine's, and throw it away, through all it can be asked.

    Compiling takes seconds where nothing is on disk yet: no request should wait for it.

    Args:
        spec: As for `registry.build_planner`.
        limits: Likewise.
    """
    depth = spec.max_depth
    plain = DraftBatch(
        num_draft_tokens=np.full(2, depth, dtype=np.int64),
        confidence=np.full((2, depth), 0.5),
        req_ids=("a", "b"),
        num_decodes=2,
    )
    # Engines trim drafts to the room there is, whatever their policy.
    select_drafts(np.full((2, 2), 0.5), np.array([2, 2]), 1)
    blank_past(np.full((2, 2), 0.5), np.array([2, 1]))
    # And watch what is accepted.
    outcomes = np.zeros((6, 1), dtype=np.int64)
    AcceptanceWatch().observe(np.full((1, 1), 0.5), outcomes, 0)
    targets_ms = np.array([TARGET_MS, np.inf])
    urgent = replace(plain, weights=np.array([2.0, 1.0]), latency_targets_ms=targets_ms)
    for batch in (plain, urgent, replace(urgent, drafts_are_sampled=True)):
        _take_steps(spec, limits, batch)


def _take_steps(spec: PolicySpec, limits: EngineLimits, batch: DraftBatch) -> None:
    planner = build_planner(spec, limits)
    planner.fit_profile(CostProfile((1, 8), (10.0, 11.0), (1.0, 1.1)))
    target_ms = None if batch.latency_targets_ms is None else TARGET_MS
    load = EngineLoad(2, 4, 20, np.array([8, 8], dtype=np.int64), 16, target_ms)
    for _ in range(NUM_STEPS):
        selection = planner.select(batch)
        planner.plan_batch(load)
        planner.choose_depth(2, target_ms)
        planner.acceptance_scale(batch.req_ids)
        stop = planner.early_exit(batch.req_ids, batch.weights)
        if stop is not None:
            stop.start(batch.req_ids).should_continue([0.5, 0.5])
        accepted = np.minimum(selection.num_admitted, 1)
        outcome = VerificationOutcome(selection.num_admitted, accepted, batch.req_ids)
        planner.observe(outcome)
        planner.observe_timing(StepTiming(2, 4, 16, 20, 2, 10.0, 1.0, 1.0, 1.0, 1.0, 4))
