"""The planner itself in every simulated step: what the compiled short cut leaves out.

It learns what drafts and steps cost as in an engine, explores, plans anew when the load
changes, and says how many requests run. Costs it is shown are exact; a drafter that was
skipped catches up for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.decisions.batching import EngineLoad
from policies.goodput import GoodputPlanner
from policies.types import (
    CostProfile,
    DraftBatch,
    EngineLimits,
    StepTiming,
    VerificationOutcome,
)

from .engine import Engine
from .selection import drafter_ms, target_ms
from .state import Fleet, Ints

_BLOCK_TOKENS = 16
"""Of a KV block, as on GPUs."""

_Asked = tuple[tuple[int, ...], Ints, Ints]
"""Requests that decoded, drafts verified of each, tokens each had still to emit."""


def make_planners(engine: Engine, num_replicas: int) -> Callable[[Fleet, int], None]:
    """Return what answers for every replica when drafts are `ASKED` for."""
    pilots = [_Pilot(engine) for _ in range(num_replicas)]
    return lambda fleet, replica: pilots[replica].decide(fleet, replica)


class _Pilot:
    """One replica's planner, and the step it has not been told the end of."""

    def __init__(self, engine: Engine) -> None:
        self._costs, self._drafts = engine.costs, engine.drafts
        costs = engine.costs
        sizes = range(costs.pad_multiple, costs.pad_limit + 1, costs.pad_multiple)
        limits = EngineLimits(
            max_tokens=costs.max_num_batched_tokens,
            max_reqs=costs.max_num_seqs,
            skips_drafter=True,
            exits_early=True,
            padded_sizes=tuple(sizes),
        )
        self._planner = GoodputPlanner.build(costs.num_drafts, limits)
        counts = tuple(2**power for power in range(10))
        self._planner.fit_profile(
            CostProfile(
                counts,
                tuple(target_ms(costs, count) for count in counts),
                tuple(drafter_ms(costs, 1, count) for count in counts),
            )
        )
        self._depth = self._planner.choose_depth(1)
        self._asked: _Asked = ((), np.empty(0, np.int64), np.empty(0, np.int64))
        self._timing: StepTiming | None = None

    def decide(self, fleet: Fleet, replica: int) -> None:
        """Say how deep the batch has drafted and what it verifies, and learn."""
        running, costs = slice(int(fleet.num_running[replica])), self._costs
        rows = np.flatnonzero(fleet.slots.prompt[replica, running] == 0)
        ids = tuple(fleet.slots.request[replica, rows].tolist())
        blocks, left = (
            fleet.slots.block[replica, rows],
            fleet.slots.output[replica, rows],
        )
        depth = self._draft(ids, blocks)
        self._learn(dict(zip(ids, left.tolist(), strict=True)))
        num_prompt_tokens = int(fleet.slots.chunk[replica, running].sum())
        num_context_tokens = int(fleet.num_kv_tokens[replica]) + num_prompt_tokens
        # The last token of a reply is no draft's.
        offered = np.minimum(self._drafts.num_offered[blocks], left - 1)
        lengths = np.minimum(offered, depth)
        some = np.flatnonzero(lengths)
        admitted = np.zeros_like(lengths)
        if some.size:
            width = int(lengths.max())
            inside = np.arange(width) < lengths[some, None]
            confidence = self._drafts.confidence[blocks[some], :width]
            batch = DraftBatch(
                num_draft_tokens=lengths[some],
                confidence=np.where(inside, confidence, 0.0),
                req_ids=tuple(ids[row] for row in some),
                num_decodes=rows.size,
                num_prefill_tokens=num_prompt_tokens,
                num_context_tokens=num_context_tokens,
            )
            admitted[some] = self._planner.select(batch).num_admitted
        self._depth = self._planner.choose_depth(rows.size)
        fleet.depth[replica] = depth
        fleet.slots.drafts[replica, running] = 0
        fleet.slots.drafts[replica, rows] = admitted
        self._asked = ids, admitted, left
        num_tokens = rows.size + int(admitted.sum())
        pass_ms = drafter_ms(costs, 1, rows.size)
        self._timing = StepTiming(
            num_reqs=rows.size,
            num_decode_tokens=num_tokens,
            num_prefill_tokens=num_prompt_tokens,
            num_context_tokens=num_context_tokens,
            depth=depth,
            target_ms=target_ms(costs, num_tokens + num_prompt_tokens)
            + costs.kv_token_ms * num_context_tokens,
            draft_first_ms=pass_ms if depth else 0.0,
            draft_next_ms=max(0, depth - 1) * pass_ms,
            host_ms=costs.base_ms + costs.request_ms * rows.size,
        )
        # Of the step after this one, which holds about as much.
        plan = self._planner.plan_batch(
            EngineLoad(
                num_running=int(fleet.num_running[replica]),
                num_decode_tokens=num_tokens,
                num_context_tokens=int(fleet.num_kv_tokens[replica]),
                tokens_to_grow=left,
                block_size=_BLOCK_TOKENS,
            )
        )
        fleet.max_running[replica] = plan.max_running

    def _draft(self, ids: tuple[int, ...], blocks: Ints) -> int:
        """Return after how many passes the drafts of a step end."""
        stop = self._planner.early_exit(ids) if self._depth > 1 else None
        if stop is None:
            return self._depth
        watch = stop.start(ids)
        for num_passes in range(1, self._depth):
            latest = self._drafts.confidence[blocks, num_passes - 1].tolist()
            offered = self._drafts.num_offered[blocks]
            ended = np.flatnonzero(offered <= num_passes).tolist()
            if not watch.should_continue(latest, ended):
                return num_passes
        return self._depth

    def _learn(self, left_now: dict[int, int]) -> None:
        """Tell what became of the step before."""
        ids, admitted, left = self._asked
        if self._timing is None:
            return
        emitted = left - np.array([left_now.get(one, 0) for one in ids])
        some = np.flatnonzero(admitted)
        self._planner.observe(
            VerificationOutcome(
                num_verified=admitted[some],
                num_accepted=emitted[some] - 1,
                req_ids=tuple(ids[row] for row in some),
            )
        )
        for one in ids:
            if one not in left_now:
                self._planner.forget(one)
        self._planner.observe_timing(self._timing)
