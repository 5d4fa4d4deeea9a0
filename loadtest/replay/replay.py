"""Recorded drafts played again under other decisions, at known prices.

The arm that verified the deepest drafts of all requests knows the outcome of every
draft it recorded. A selector chooses among them, is paid the tokens that were in fact
accepted, and is charged what its step costs. Prompts are left out, and so is the fact
that other choices would have led to other drafts: recorded blocks stand for those to
come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.planner import Planner
from policies.types import DraftBatch, StepTiming, VerificationOutcome

from .prices import StepPrices
from .traces import Array, RecordedTrace

MAX_PRICE_UPDATES = 12


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One recorded step whose drafts were all verified, its prompts left out.

    Attributes:
        num_reqs: Requests that decoded, with or without drafts.
        num_context_tokens: KV positions attended to.
        req_ids: `[num_drafting]`.
        confidence: `[num_drafting, max_depth]`, 0-1; 0 past what was offered.
        num_offered: `[num_drafting]`, drafts there were.
        num_accepted: `[num_drafting]`, what the target accepted of each.
    """

    num_reqs: int
    num_context_tokens: int
    req_ids: tuple[int, ...]
    confidence: Array
    num_offered: NDArray[np.int64]
    num_accepted: NDArray[np.int64]

    def gain(self, num_admitted: NDArray[np.int64]) -> float:
        """Return the tokens of the step if so much of each draft is verified."""
        return self.num_reqs + float(np.minimum(num_admitted, self.num_accepted).sum())


@dataclass(frozen=True, slots=True)
class Played:
    """What a selector made of the steps.

    Attributes:
        tokens: `[num_steps]`.
        ms: `[num_steps]`.
    """

    tokens: Array
    ms: Array

    def tokens_per_s(self) -> float:
        """Return the speed over all steps."""
        return float(1e3 * self.tokens.sum() / self.ms.sum())


def read_steps(trace: RecordedTrace, max_depth: int) -> list[ReplayStep]:
    """Read the steps in which requests decoded and all of whose drafts were verified.

    Under load nearly every step carries a prompt as well. Its time is left out: it
    belongs to the tokens of that request, whatever is verified beside it. Steps outside
    the steady part are left out too.

    Args:
        trace: Of an arm that verifies all it drafts.
        max_depth: Drafts are cut to this length.
    """
    confidence = np.nan_to_num(trace.draft("confidence"))[:, :max_depth]
    verified, accepted, offered, step, req = (
        trace.draft(name).astype(np.int64)
        for name in ("num_verified", "num_accepted", "num_offered", "step", "req")
    )
    num_decode_tokens = trace.step("num_decode_tokens")
    num_context_tokens = np.nan_to_num(trace.step("num_context_tokens"))
    is_usable = ~np.isnan(num_decode_tokens) & trace.is_steady()
    is_known = (accepted >= 0) & (verified == offered)
    is_usable[step[~is_known & (step < is_usable.size)]] = False
    found = []
    for number in np.unique(step[step < is_usable.size]):
        if not is_usable[number]:
            continue
        rows = np.flatnonzero(step == number)
        found.append(
            ReplayStep(
                num_reqs=int(num_decode_tokens[number] - verified[rows].sum()),
                num_context_tokens=int(num_context_tokens[number]),
                req_ids=tuple(req[rows].tolist()),
                confidence=confidence[rows],
                num_offered=np.minimum(offered[rows], max_depth),
                num_accepted=np.minimum(accepted[rows], max_depth),
            )
        )
    return found


def play_fixed(steps: Sequence[ReplayStep], prices: StepPrices, depth: int) -> Played:
    """Draft `depth` deep and verify everything."""
    lengths = [np.minimum(step.num_offered, depth) for step in steps]
    num_tokens = np.array(
        [step.num_reqs + own.sum() for step, own in zip(steps, lengths, strict=True)],
        dtype=np.float64,
    )
    gained = [step.gain(own) for step, own in zip(steps, lengths, strict=True)]
    context = np.array([step.num_context_tokens for step in steps], dtype=np.float64)
    ms = prices.step_ms(num_tokens, depth) + prices.context.at(context)
    return Played(np.array(gained), ms)


def play_clairvoyant(
    steps: Sequence[ReplayStep], prices: StepPrices, max_depth: int
) -> Played:
    """Draft as deep as pays, and verify nothing that is rejected.

    Maximising tokens per time is maximising, step by step, tokens minus time priced at
    that ratio itself (Dinkelbach); the price is updated until it stays.
    """
    tokens_per_ms = 0.0
    played = Played(np.empty(0), np.empty(0))
    for _ in range(MAX_PRICE_UPDATES):
        best = [_best_foreseen(one, prices, max_depth, tokens_per_ms) for one in steps]
        tokens, ms = np.array(best).T
        played = Played(tokens, ms)
        before, tokens_per_ms = tokens_per_ms, float(tokens.sum() / ms.sum())
        if abs(tokens_per_ms - before) <= 1e-6 * tokens_per_ms:
            break
    return played


def play_planner(
    steps: Sequence[ReplayStep], planner: Planner, prices: StepPrices
) -> Played:
    """Let a planner decide, in the order in which an engine asks it.

    What it drafts after a step, with the early end it allows, is what it can verify in
    the next; it learns from outcomes, and is shown what its steps cost.

    Args:
        steps: In order; after the last comes the first again.
        planner: Keeps what it learns.
        prices: What is charged, and what the planner is told that a step took.
    """
    last_step_of = {req: n for n, step in enumerate(steps) for req in step.req_ids}
    depth = _draft(planner, steps[0], planner.choose_depth(steps[0].num_reqs))
    tokens, ms = np.empty(len(steps)), np.empty(len(steps))
    num_missing = 0
    for number, step in enumerate(steps):
        admitted = _select(planner, step, depth)
        chosen = planner.choose_depth(step.num_reqs)
        depth = _draft(planner, steps[(number + 1) % len(steps)], chosen)
        num_tokens = step.num_reqs + int(admitted.sum())
        backlog = 0
        if depth == 0:
            num_missing = min(num_missing + num_tokens, step.num_context_tokens)
        else:
            backlog, num_missing = num_missing, 0
        timing = _price(step, prices, num_tokens, depth, backlog)
        tokens[number] = step.gain(admitted)
        ms[number] = timing.total_ms + timing.backlog_ms
        planner.observe(_outcome(step, admitted))
        for req_id in step.req_ids:
            if last_step_of[req_id] == number:
                planner.forget(req_id)
        planner.observe_timing(timing)
    return Played(tokens, ms)


def play_own(trace: RecordedTrace, prices: StepPrices) -> Played | None:
    """Price the decisions that an arm took itself, in the steady part.

    Steps whose outcome is not known in full are left out; None if that leaves nothing.
    """
    num_decode_tokens = trace.step("num_decode_tokens")
    num_steps = num_decode_tokens.size
    step = trace.draft("step").astype(np.int64)
    inside = step < num_steps
    accepted = trace.draft("num_accepted")
    gained = np.bincount(step[inside], np.maximum(accepted, 0)[inside], num_steps)
    verified = trace.draft("num_verified")
    counted = np.bincount(step[inside], verified[inside], num_steps)
    # An outcome is missing where something was admitted and nothing came of it.
    missing = (accepted < 0) & (trace.draft("num_admitted") > 0)
    unknown = np.bincount(step[inside], missing[inside], num_steps) > 0
    num_reqs = num_decode_tokens - counted
    kept = ~np.isnan(num_decode_tokens) & ~unknown & (num_reqs > 0) & trace.is_steady()
    if not kept.any():
        return None
    depth = np.nan_to_num(trace.step("depth")).astype(np.int64)
    num_tokens = (num_reqs + counted)[kept]
    ms = np.nan_to_num(trace.step("backlog_ms"))[kept]
    ms += prices.context.at(trace.step("num_context_tokens")[kept])
    for one in np.unique(depth[kept]).tolist():
        own = depth[kept] == one
        ms[own] += prices.step_ms(num_tokens[own], one)
    return Played((num_reqs + gained)[kept], ms)


def _select(planner: Planner, step: ReplayStep, depth: int) -> NDArray[np.int64]:
    """Return what is verified of drafts cut to `depth`."""
    lengths = np.minimum(step.num_offered, depth)
    rows = np.flatnonzero(lengths)
    admitted = np.zeros_like(lengths)
    if rows.size:
        width = int(lengths.max())
        inside = np.arange(width) < lengths[rows, None]
        batch = DraftBatch(
            num_draft_tokens=lengths[rows],
            confidence=np.where(inside, step.confidence[rows, :width], 0.0),
            req_ids=tuple(step.req_ids[row] for row in rows),
            num_decodes=step.num_reqs,
            num_context_tokens=step.num_context_tokens,
        )
        admitted[rows] = planner.select(batch).num_admitted
    return admitted


def _outcome(step: ReplayStep, admitted: NDArray[np.int64]) -> VerificationOutcome:
    rows = np.flatnonzero(admitted)
    return VerificationOutcome(
        num_verified=admitted[rows],
        num_accepted=np.minimum(admitted, step.num_accepted)[rows],
        req_ids=tuple(step.req_ids[row] for row in rows),
    )


def _draft(planner: Planner, step: ReplayStep, depth: int) -> int:
    """Return after how many passes the draft of a step ends."""
    depth = min(depth, step.confidence.shape[1])
    stop = planner.early_exit(step.req_ids) if depth > 1 else None
    if stop is None:
        return depth
    watch = stop.start(step.req_ids)
    for num_passes in range(1, depth):
        latest = step.confidence[:, num_passes - 1].tolist()
        ended = np.flatnonzero(step.num_offered <= num_passes).tolist()
        if not watch.should_continue(latest, ended):
            return num_passes
    return depth


def _price(
    step: ReplayStep, prices: StepPrices, num_tokens: int, depth: int, backlog: int
) -> StepTiming:
    return StepTiming(
        num_reqs=step.num_reqs,
        num_decode_tokens=num_tokens,
        num_prefill_tokens=0,
        num_context_tokens=step.num_context_tokens,
        depth=depth,
        target_ms=float(
            prices.target.at(num_tokens) + prices.context.at(step.num_context_tokens)
        ),
        draft_first_ms=float(prices.draft_first.at(num_tokens)) if depth else 0.0,
        draft_next_ms=max(0, depth - 1) * prices.draft_next_ms,
        host_ms=prices.host_ms,
        backlog_ms=prices.backlog_ms(backlog),
        num_backlog=backlog,
    )


def _best_foreseen(
    step: ReplayStep, prices: StepPrices, max_depth: int, tokens_per_ms: float
) -> tuple[float, float]:
    """Return tokens and milliseconds of the best depth and count of right drafts."""
    best = (-np.inf, 0.0, 0.0)
    for depth in range(max_depth + 1):
        num_right = int(np.minimum(step.num_accepted, depth).sum())
        tokens = np.arange(num_right + 1, dtype=np.float64) + step.num_reqs
        step_ms = prices.step_ms(tokens, depth)
        step_ms = step_ms + prices.context.at(step.num_context_tokens)
        surplus = tokens - tokens_per_ms * step_ms
        count = int(np.argmax(surplus))
        own = (float(surplus[count]), float(tokens[count]), float(step_ms[count]))
        best = max(best, own)
    return best[1], best[2]
