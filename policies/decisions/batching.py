"""The dynamic batcher: how many sequences run, how much prompt joins a step."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from policies.decisions.batch_value import value_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from policies.decisions.batch_value import ClassLoad
    from policies.estimators.step_cost import StepCost
    from policies.types import EngineLimits

GOODPUT_TOLERANCE = 0.98
"""More sequences are let in while goodput stays within 2 % of its best: step costs are
known to about that, and a longer queue is worse than a slightly fuller batch."""

MIN_PREFILL_TOKENS = 16
"""Prompt tokens that may always join a step, so that a latency target that even an
empty batch misses slows waiting requests down but never starves them."""

GROWTH_SHARE = 0.5
"""Share of the expected growth of running requests for which KV blocks are held back:
while some grow others end and return theirs. A floor under the need that the engine's
adapter foresees, which rests on expected lengths: where outputs differ much, that need
alone is too little, and requests are preempted."""


REBATCH_EVERY = 16
"""Fewest steps between two choices of how many requests may run."""

TRY_LARGER_AFTER, TRY_LARGER_AT_MOST = 8, 256
"""Such choices in a row, with more waiting than may run, after which half as many again
are let in: what a larger batch costs is a guess where none has run, and would confirm
itself. A start-up profile whose pass over 16 tokens had waited for a neighbour kept
half of 16 requests out for good. Twice as many after every trial that changed nothing,
up to so many."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine is doing when a step is planned.

    Attributes:
        num_running: Requests that hold KV blocks.
        num_decode_tokens: Decode and draft tokens of the coming step.
        num_context_tokens: KV positions attended to, summed over requests.
        tokens_to_grow: `[num_running]`, int64, positions each is expected to take up
            still.
        block_size: Positions per KV block.
        latency_target_ms: Longest time per token that the most latency-bound running
            request wants, or None.
        classes: Of the requests that run or ran of late; empty where none has a target.
        is_held_back: Nothing is drafted, whatever the policy plans: an audit holds it
            back (`policies.audit`).
        num_waiting: Requests that would run too.
    """

    num_running: int
    num_decode_tokens: int
    num_context_tokens: int
    tokens_to_grow: NDArray[np.int64]
    block_size: int
    latency_target_ms: float | None = None
    classes: tuple[ClassLoad, ...] = ()
    is_held_back: bool = False
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Limits for the coming step.

    Attributes:
        max_running: Sequences that may run; those that run already go on.
        max_prefill_tokens: Prompt tokens that may join.
        reserved_blocks: KV blocks kept for the growth of what is running.
    """

    max_running: int
    max_prefill_tokens: int
    reserved_blocks: int


@dataclass(slots=True)
class BatchControl:
    """Chooses how many requests run and how much prompt joins a step.

    Attributes:
        cost: The learnt step cost.
        limits: The engine's.
        latency_target_ms: Longest step, or None.
    """

    cost: StepCost
    limits: EngineLimits
    latency_target_ms: float | None = None
    _next_choice: int = field(init=False, default=0)
    _num_planned: int = field(init=False, default=0)
    _max_running: int = field(init=False, default=0)
    _most: int = field(init=False, default=0)
    _num_bound: int = field(init=False, default=0)
    _patience: int = field(init=False, default=TRY_LARGER_AFTER)

    def plan(
        self,
        load: EngineLoad,
        *,
        num_steps: int,
        depth: int,
        tokens_in_full: float = 1.0,
        tokens_by_depth: Callable[[], NDArray[np.float64]] | None = None,
    ) -> BatchPlan:
        """Plan a step.

        Args:
            load: What the engine is doing.
            num_steps: Steps so far, as far as they were counted: steps that are held
                back are not, where requests wait.
            depth: To which is drafted; at 0 some engines run no drafter.
            tokens_in_full: Of that depth, as `DepthEstimate.tokens_in_full`.
            tokens_by_depth: As in `value_batches`, asked where there are classes.
        """
        # Its own steps besides, for the count may stand still.
        self._num_planned += 1
        if num_steps >= self._next_choice or self._num_planned > REBATCH_EVERY:
            self._next_choice = num_steps + REBATCH_EVERY
            self._num_planned = 1
            most = self._choose_max_running(load, tokens_by_depth)
            # Of those that run some have just ended, and their places are not taken.
            num_wanted = load.num_running + load.num_waiting
            is_bound = most < self.limits.max_reqs and num_wanted > most
            self._num_bound = self._num_bound + 1 if is_bound else 0
            self._max_running = self._try_larger(most, load) if is_bound else most
        if load.is_held_back:
            depth, tokens_in_full = 0, 1.0
        is_cold = self.limits.skips_drafter and depth == 0
        return BatchPlan(
            max_running=self._max_running,
            max_prefill_tokens=choose_prefill_tokens(
                self.cost,
                load,
                self.limits.max_tokens,
                self.latency_target_ms,
                num_passes=0 if is_cold else max(1, depth),
                tokens_in_full=tokens_in_full,
            ),
            reserved_blocks=reserve_blocks(load),
        )

    def _choose_max_running(
        self,
        load: EngineLoad,
        tokens_by_depth: Callable[[], NDArray[np.float64]] | None,
    ) -> int:
        max_reqs, runs_drafter = self.limits.max_reqs, not self.limits.skips_drafter
        batch = self.cost, self.cost.context_per_req, max_reqs
        most = choose_max_running(
            *batch, self.latency_target_ms, runs_drafter=runs_drafter
        )
        if not load.classes or tokens_by_depth is None:
            return most
        tokens = tokens_by_depth()
        if load.is_held_back:
            tokens = tokens[:1]
        value = value_batches(*batch, load.classes, tokens, runs_drafter=runs_drafter)
        if not value.any():
            return most
        enough = np.flatnonzero(value >= GOODPUT_TOLERANCE * value.max())
        return min(most, 1 + int(enough[-1]))

    def _try_larger(self, most: int, load: EngineLoad) -> int:
        """Return how many may run; now and then more, where no target forbids it."""
        if most > self._most:
            self._patience = TRY_LARGER_AFTER
        self._most = most
        targets_ms = (self.latency_target_ms, load.latency_target_ms)
        if targets_ms != (None, None) or self._num_bound < self._patience:
            return most
        self._num_bound = 0
        self._patience = min(2 * self._patience, TRY_LARGER_AT_MOST)
        return min(self.limits.max_reqs, most + max(1, most // 2))


def choose_max_running(
    cost: StepCost,
    context_per_req: float,
    max_reqs: int,
    latency_target_ms: float | None,
    *,
    runs_drafter: bool = False,
) -> int:
    """Return the largest batch that loses no goodput and meets the latency target.

    By plain decoding: what speculation adds is fitted into the rest by the draft
    budget, which knows the target too.

    Args:
        cost: The learnt step cost.
        context_per_req: Mean KV positions per request; 0 where it is not known yet.
        max_reqs: The engine's own limit, >= 1.
        latency_target_ms: Longest step wanted, or None.
        runs_drafter: The drafter's first pass is part of every step, also of one
            that drafts nothing.

    Returns:
        1..max_reqs; 1 if no batch meets the target.
    """
    sizes = np.arange(1, max_reqs + 1, dtype=np.float64)
    step_ms = cost.batch_ms(sizes, context_per_req) + cost.host.predict(sizes)
    if runs_drafter:
        step_ms = step_ms + cost.draft_first.predict(sizes)
    goodput = sizes / np.maximum(step_ms, 1e-3)
    allowed = goodput >= GOODPUT_TOLERANCE * goodput.max()
    if latency_target_ms is not None:
        meets = step_ms <= latency_target_ms
        if not meets.any():
            return 1
        allowed = meets & (goodput >= GOODPUT_TOLERANCE * goodput[meets].max())
    return int(sizes[allowed][-1])


def choose_prefill_tokens(
    cost: StepCost,
    load: EngineLoad,
    max_tokens: int,
    latency_target_ms: float | None,
    *,
    num_passes: int = 0,
    tokens_in_full: float = 1.0,
) -> int:
    """Return the prompt tokens that fit into a step beside its decoding requests.

    Without a target, or with nobody decoding, prompts may fill the step: finishing
    them sooner only lets more requests decode. A request's own target counts while a
    step without prompts meets it; beyond that, waiting would gain nobody anything.

    Args:
        cost: The learnt step cost.
        load: What the step carries already.
        max_tokens: The engine's own limit.
        latency_target_ms: Longest step wanted, or None.
        num_passes: Drafter passes of the step; the first runs over the prompts too.
        tokens_in_full: A step brings a request that is bound so many tokens with all
            its drafts: a target is per token.

    Returns:
        `MIN_PREFILL_TOKENS..max_tokens`.
    """
    own_ms = load.latency_target_ms
    if own_ms is not None:
        own_ms *= tokens_in_full
    has_target = latency_target_ms is not None or own_ms is not None
    if load.num_decode_tokens == 0 or not has_target:
        return max_tokens
    fixed_ms = cost.context_ms(load.num_context_tokens)
    fixed_ms += cost.host_ms(load.num_running)
    num_drafts = max(0, load.num_decode_tokens - load.num_running)
    fixed_ms += float(cost.sampling.predict_ms(load.num_running, num_drafts))
    if num_passes > 0:
        fixed_ms += float(cost.draft_next_ms(load.num_running, num_passes))

    def step_ms(num_prefill_tokens: int) -> float:
        num_tokens = load.num_decode_tokens + num_prefill_tokens
        first_ms = cost.draft_first.at(num_tokens) if num_passes > 0 else 0.0
        return fixed_ms + cost.target.at(num_tokens) + first_ms

    targets_ms = [] if latency_target_ms is None else [latency_target_ms]
    if own_ms is not None and step_ms(0) <= own_ms:
        targets_ms.append(own_ms)
    if not targets_ms:
        return max_tokens
    # More tokens never take less time.
    most = bisect_right(range(max_tokens + 1), min(targets_ms), key=step_ms) - 1
    return max(MIN_PREFILL_TOKENS, most)


def reserve_blocks(load: EngineLoad) -> int:
    """Return the KV blocks to keep free for the growth of running requests.

    A newcomer that takes the last block makes vLLM preempt a running request a few
    steps later and compute it all over again.
    """
    growth = int(load.tokens_to_grow.sum())
    return math.ceil(GROWTH_SHARE * growth / load.block_size)
