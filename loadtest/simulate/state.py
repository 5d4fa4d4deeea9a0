"""What a simulated fleet is made of: arrays that compiled loops change in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.decisions.recent_drafts import NUM_REMEMBERED_DRAFTS, NUM_SAMPLES
from policies.decisions.routing import NUM_DRAWS, USUAL_BASE_SHARE
from policies.estimators.reply_length import USUAL_TOKENS

from .prefixes import BLOCK_TOKENS, Prefixes, make_prefixes

NO_REQUEST = -1
NO_LIMIT = 1 << 40

CAME, BEGUN, LEFT = range(3)
"""Kinds of events: a request came to a replica, had its first token there, was done."""

ALL, WORTH, FORESEEN, ASKED = range(4)
"""Which drafts a step verifies: all; those worth their time, by the functions of the
`goodput` policy; likewise, and as deep as pays, by what is known of these very drafts;
those that whoever calls `kernel.advance` has said."""


class Costs(NamedTuple):
    """What a step takes, ms, and what it may hold.

    `base + request * requests + max(floor, token * tokens) + kv_token * KV tokens +
    depth * (draft_pass + draft_token * requests)`.

    Attributes:
        base_ms: Of every step.
        request_ms: Of each request in it that decodes.
        token_ms: Of each token that the target computes.
        floor_ms: That the tokens take at least: reading the weights.
        kv_token_ms: Of each token that is attended to.
        draft_pass_ms: Of each of the drafter's passes.
        draft_token_ms: Of each request in it.
        pad_multiple: Tokens are padded to a multiple of it, for CUDA graphs; 1 for no
            padding.
        pad_limit: Beyond it nothing is padded.
        num_drafts: Of a request in a step, at most.
        max_num_seqs: Requests in a step at most.
        max_num_batched_tokens: Tokens in a step at most; prompts come in chunks.
        draft_slots: Of these tokens that each request in a step takes besides its own,
            for its drafter's input: vLLM keeps one for a draft model's.
        max_kv_tokens: In the KV cache at most. A request joins where its prompt fits
            beside what the others have, or alone; where there is no room for a step,
            the one that joined last gives its place up, and computes anew.
        rule: `ALL`, `WORTH`, `FORESEEN` or `ASKED`.
        contention: How much longer a step takes while all other replicas run too, a
            share: for replicas on one machine.
    """

    base_ms: float
    request_ms: float
    token_ms: float
    floor_ms: float
    kv_token_ms: float
    draft_pass_ms: float
    draft_token_ms: float
    pad_multiple: int
    pad_limit: int
    num_drafts: int
    max_num_seqs: int
    max_num_batched_tokens: int
    draft_slots: int = 0
    max_kv_tokens: int = 1 << 40
    rule: int = ALL
    contention: float = 0.0


class Drafts(NamedTuple):
    """What is drafted: blocks, of which a request takes one in each step, in order.

    A request begins anywhere among those of its kind, and after the last of them comes
    the first again.

    Attributes:
        survival: `[num_blocks, num_drafts]`, chance that a draft and all before it are
            accepted, as whoever selects knows it; 0 past what was offered.
        confidence: `[num_blocks, num_drafts]`, of its drafter, for who learns.
        num_offered: `[num_blocks]`, drafts there are.
        num_accepted: `[num_blocks]`, what the target accepts if all are verified; -1
            where the request's luck says, by `survival`.
        first: `[num_kinds + 1]`, first block of each kind, and their number.
    """

    survival: NDArray[np.float64]
    confidence: NDArray[np.float64]
    num_offered: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    first: NDArray[np.int64]


class Events(NamedTuple):
    """What happened at replicas, in the order in which routers are told.

    Attributes:
        when_s: `[3 * num_requests]`, rising.
        kind: Same shape, `CAME`, `BEGUN` or `LEFT`.
        request: Same shape.
        tokens_per_step: Same shape, of the replica then, as its engine follows it.
        num_running: Same shape, likewise.
        num_kv_tokens: Same shape, likewise.
    """

    when_s: NDArray[np.float64]
    kind: NDArray[np.int64]
    request: NDArray[np.int64]
    tokens_per_step: NDArray[np.float64]
    num_running: NDArray[np.int64]
    num_kv_tokens: NDArray[np.int64]


class Telemetry(NamedTuple):
    """What a router knows of each replica; all `[num_replicas]` but for the last two.

    Attributes:
        num_there: Requests, as of the age of telemetry.
        num_sent: Requests, by the router's own count: those it sent and has not been
            told the end of.
        num_prompt_tokens: Of those sent that have not begun, as far as it was told.
        tokens_per_step: As of the age of telemetry.
        num_running: Likewise.
        num_kv_tokens: Likewise.
        can_take: Whether it has a seat, by all of this.
        learnt: `[2]`, the base share of steps, and the usual length of a reply.
        draws: `[NUM_DRAWS]`, random numbers of a decision.
    """

    num_there: NDArray[np.int64]
    num_sent: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    tokens_per_step: NDArray[np.float64]
    num_running: NDArray[np.int64]
    num_kv_tokens: NDArray[np.int64]
    can_take: NDArray[np.bool_]
    learnt: NDArray[np.float64]
    draws: NDArray[np.float64]


class Requests(NamedTuple):
    """What arrives, and what became of it; all `[num_requests]`.

    Attributes:
        arrival_s: float64, rising.
        num_prompt_tokens: int64, >= 1.
        num_output_tokens: int64, >= 1.
        kind: int64, a row of the acceptance table.
        replica: int64, where it went.
        seen: int64, requests that the router believed to be there.
        first_token_s: float64, NaN until then.
        finish_s: float64, NaN until then.
        num_finishes: int64.
        num_emitted: int64, tokens it had when it last lost its place.
        resumed_s: float64, when it went on after that; NaN until then.
        num_cached: int64, prompt tokens that were found where it began.
        chain: `[num_named]`, blocks of all prompts and replies, by name.
        chain_first: `[num_requests + 1]`, where each request's begin in it.
    """

    arrival_s: NDArray[np.float64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    kind: NDArray[np.int64]
    replica: NDArray[np.int64]
    seen: NDArray[np.int64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    num_finishes: NDArray[np.int64]
    num_emitted: NDArray[np.int64]
    resumed_s: NDArray[np.float64]
    num_cached: NDArray[np.int64]
    chain: NDArray[np.int64]
    chain_first: NDArray[np.int64]


class Fleet(NamedTuple):
    """State between two calls.

    Attributes:
        slot_request: `[num_replicas, max_num_seqs]`, requests in the batch.
        slot_prompt: Same shape, prompt tokens still to compute.
        slot_chunk: Same shape, those in the step that runs.
        slot_output: Same shape, tokens still to emit.
        slot_block: Same shape, what the request drafts next.
        slot_drafts: Same shape, drafts that the step verifies.
        slot_joined: Same shape, in which order requests came into it.
        slot_draw: Same shape, uint64, random state of the request's acceptance.
        num_running: `[num_replicas]`.
        num_kv_tokens: `[num_replicas]`, of all requests in the batch.
        first_waiting: `[num_replicas]`, head of a list through `next_waiting`.
        last_waiting: `[num_replicas]`.
        next_waiting: `[num_requests]`.
        heap_s: `[num_replicas]`, when steps end; a binary heap.
        heap_replica: `[num_replicas]`, whose step it is.
        num_kv_held: `[num_replicas]`, whole prompts and what there is of replies of
            those in the batch.
        tokens_per_step: `[num_replicas]`, as its engine follows it.
        limits: `[num_replicas, 2]`, requests that may be in the coming step, and prompt
            tokens that may join it, if these are fewer than its engine takes.
        slowness: `[num_replicas]`, its steps take so many times what they should.
        step_ms: `[num_replicas]`, of the step that runs.
        depth: `[num_replicas]`, drafter passes of the step that runs.
        recent: `[num_replicas, NUM_REMEMBERED_DRAFTS]`, blocks drafted of late, a ring.
        num_steps: `[num_replicas, 2]`, steps that drafted, and blocks in the ring ever.
        plan: `[num_replicas, 3]`, depth, tokens that a millisecond is worth, and
            drafts verified per request.
        next_acceptance: `[num_replicas, NUM_SAMPLES]`, of recent drafts.
        events: What happened.
        telemetry: What the router knows of it.
        prefixes: What replicas have of earlier requests, and who had which.
        counts: Next arrival, heap size, events so far, events told, steps done,
            request-steps done, next of round robin, replicas that take requests: the
            first ones; whether the replica on top of the heap waits for its drafts;
            requests that have joined a batch, and that lost their place.
        draw: `[1]`, uint64, random state of the router.
    """

    slot_request: NDArray[np.int64]
    slot_prompt: NDArray[np.int64]
    slot_chunk: NDArray[np.int64]
    slot_output: NDArray[np.int64]
    slot_block: NDArray[np.int64]
    slot_drafts: NDArray[np.int64]
    slot_joined: NDArray[np.int64]
    slot_draw: NDArray[np.uint64]
    num_running: NDArray[np.int64]
    num_kv_tokens: NDArray[np.int64]
    first_waiting: NDArray[np.int64]
    last_waiting: NDArray[np.int64]
    next_waiting: NDArray[np.int64]
    heap_s: NDArray[np.float64]
    heap_replica: NDArray[np.int64]
    num_kv_held: NDArray[np.int64]
    tokens_per_step: NDArray[np.float64]
    limits: NDArray[np.int64]
    slowness: NDArray[np.float64]
    step_ms: NDArray[np.float64]
    depth: NDArray[np.int64]
    recent: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    plan: NDArray[np.float64]
    next_acceptance: NDArray[np.float64]
    events: Events
    telemetry: Telemetry
    prefixes: Prefixes
    counts: NDArray[np.int64]
    draw: NDArray[np.uint64]


ARRIVED, HEAPED, HAPPENED, TOLD, STEPS, REQUEST_STEPS, TURN, OPEN = range(8)
WAITS, JOINED, PREEMPTED = range(8, 11)
"""Places in `Fleet.counts`."""


def make_fleet(
    num_replicas: int,
    max_num_seqs: int,
    num_requests: int,
    seed: int,
    num_blocks: int = 0,
    block_tokens: int = BLOCK_TOKENS,
) -> Fleet:
    """Return an idle fleet; `num_blocks` names of blocks are used."""
    slots = (num_replicas, max_num_seqs)
    return Fleet(
        slot_request=np.zeros(slots, np.int64),
        slot_prompt=np.zeros(slots, np.int64),
        slot_chunk=np.zeros(slots, np.int64),
        slot_output=np.zeros(slots, np.int64),
        slot_block=np.zeros(slots, np.int64),
        slot_drafts=np.zeros(slots, np.int64),
        slot_joined=np.zeros(slots, np.int64),
        slot_draw=np.zeros(slots, np.uint64),
        num_running=np.zeros(num_replicas, np.int64),
        num_kv_tokens=np.zeros(num_replicas, np.int64),
        first_waiting=np.full(num_replicas, NO_REQUEST, np.int64),
        last_waiting=np.full(num_replicas, NO_REQUEST, np.int64),
        next_waiting=np.full(num_requests, NO_REQUEST, np.int64),
        heap_s=np.zeros(num_replicas),
        heap_replica=np.zeros(num_replicas, np.int64),
        num_kv_held=np.zeros(num_replicas, np.int64),
        tokens_per_step=np.ones(num_replicas),
        limits=np.full((num_replicas, 2), NO_LIMIT, np.int64),
        slowness=np.ones(num_replicas),
        step_ms=np.zeros(num_replicas),
        depth=np.zeros(num_replicas, np.int64),
        recent=np.zeros((num_replicas, NUM_REMEMBERED_DRAFTS), np.int64),
        num_steps=np.zeros((num_replicas, 2), np.int64),
        # As `GoodputPlanner` begins: one deep.
        plan=np.tile([1.0, 0.0, 0.0], (num_replicas, 1)),
        next_acceptance=np.ones((num_replicas, NUM_SAMPLES)),
        events=Events(
            when_s=np.zeros(3 * num_requests),
            kind=np.zeros(3 * num_requests, np.int64),
            request=np.zeros(3 * num_requests, np.int64),
            tokens_per_step=np.zeros(3 * num_requests),
            num_running=np.zeros(3 * num_requests, np.int64),
            num_kv_tokens=np.zeros(3 * num_requests, np.int64),
        ),
        telemetry=Telemetry(
            num_there=np.zeros(num_replicas, np.int64),
            num_sent=np.zeros(num_replicas, np.int64),
            num_prompt_tokens=np.zeros(num_replicas, np.int64),
            tokens_per_step=np.ones(num_replicas),
            num_running=np.zeros(num_replicas, np.int64),
            num_kv_tokens=np.zeros(num_replicas, np.int64),
            can_take=np.ones(num_replicas, np.bool_),
            learnt=np.array([USUAL_BASE_SHARE, USUAL_TOKENS]),
            draws=np.zeros(NUM_DRAWS),
        ),
        prefixes=make_prefixes(num_replicas, num_blocks, block_tokens),
        counts=np.array([0, 0, 0, 0, 0, 0, 0, num_replicas, 0, 0, 0]),
        draw=np.array([seed], np.uint64),
    )
