"""What a simulated fleet is made of: arrays that compiled loops change in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .prefixes import Prefixes

NO_REQUEST = -1

CAME, BEGUN, LEFT = range(3)
"""Kinds of events: a request came to a replica, had its first token there, was done."""

ALL, WORTH, FORESEEN, ASKED = range(4)
"""Which drafts a step verifies: all; those worth their time, by the functions of the
`goodput` policy; likewise, and as deep as pays, by what is known of these very drafts;
those that whoever calls `kernel.advance` has said."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Costs(NamedTuple):
    """What a step takes, ms, and what it may hold.

    `base + request * requests + max(floor, token * tokens) + kv_token * KV tokens +
    depth * (draft_pass + draft_token * requests)`.
    """

    base_ms: float  # of every step
    request_ms: float  # of each request in it that decodes
    token_ms: float  # of each token that the target computes
    floor_ms: float  # that the tokens take at least: reading the weights
    kv_token_ms: float  # of each token that is attended to
    draft_pass_ms: float  # of each of the drafter's passes
    draft_token_ms: float  # of each request in it
    num_drafts: int  # of a request in a step, at most
    max_num_seqs: int  # requests in a step at most
    max_num_batched_tokens: int  # in a step at most; prompts come in chunks
    pad_multiple: int = 1  # of tokens, to which CUDA graphs pad them
    pad_limit: int = 0  # beyond it nothing is padded
    # Of these tokens that each request in a step takes besides its own, for its
    # drafter's input: vLLM keeps one for a draft model's.
    draft_slots: int = 0
    # In the KV cache at most. A request joins where its prompt fits beside what the
    # others have, or alone; where there is no room for a step, the one that joined last
    # gives its place up, and computes anew.
    max_kv_tokens: int = 1 << 40
    rule: int = ALL  # or `WORTH`, `FORESEEN`, `ASKED`
    # How much longer a step takes while all other replicas run too, a share: for
    # replicas on one machine.
    contention: float = 0.0


class Drafts(NamedTuple):
    """What is drafted: blocks, of which a request takes one in each step, in order.

    A request begins anywhere among those of its kind, and after the last of them comes
    the first again.
    """

    # `[num_blocks, num_drafts]`, chance that a draft and all before it are accepted, as
    # whoever selects knows it; 0 past what was offered.
    survival: Floats
    confidence: Floats  # `[num_blocks, num_drafts]`, of its drafter, for who learns
    num_offered: Ints  # `[num_blocks]`, drafts there are
    # `[num_blocks]`, what the target accepts if all are verified; -1 where the
    # request's luck says, by `survival`.
    num_accepted: Ints
    first: Ints  # `[num_kinds + 1]`, first block of each kind, and their number


class Events(NamedTuple):
    """What happened at replicas, in the order in which routers are told.

    All `[3 * num_requests]`; the last three are of the replica then.
    """

    when_s: Floats  # rising
    kind: Ints  # `CAME`, `BEGUN` or `LEFT`
    request: Ints
    tokens_per_step: Floats  # as its engine follows it
    num_running: Ints
    num_kv_tokens: Ints


class Telemetry(NamedTuple):
    """What a router knows of each replica; `[num_replicas]` but for the last two."""

    num_there: Ints  # requests, as of the age of telemetry
    num_sent: Ints  # by its own count: sent, and not told the end of
    num_prompt_tokens: Ints  # of those sent that have not begun, as far as it was told
    tokens_per_step: Floats  # as of the age of telemetry
    num_running: Ints  # likewise
    num_kv_tokens: Ints  # likewise
    can_take: NDArray[np.bool_]  # whether it has a seat, by all of this
    learnt: Floats  # `[2]`, the base share of steps, and the usual length of a reply
    draws: Floats  # `[NUM_DRAWS]`, random numbers of a decision


class Requests(NamedTuple):
    """What arrives, as `Drawn` has it, and what became of it; all `[num_requests]`."""

    arrival_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    kind: Ints
    replica: Ints  # where it went
    first_token_s: Floats  # NaN until then
    finish_s: Floats  # likewise
    num_finishes: Ints
    num_emitted: Ints  # tokens it had when it last lost its place
    resumed_s: Floats  # when it first went on after losing it; NaN until then
    num_cached: Ints  # prompt tokens that were found where it began
    luck: Ints  # its number in what was drawn: equal ones have equal luck
    chain: Ints  # `[num_named]`
    chain_first: Ints  # `[num_requests + 1]`


class Slots(NamedTuple):
    """Places in batches; all `[num_replicas, max_num_seqs]`."""

    request: Ints
    prompt: Ints  # tokens still to compute
    chunk: Ints  # those in the step that runs
    output: Ints  # tokens still to emit
    block: Ints  # what the request drafts next
    drafts: Ints  # that the step verifies
    joined: Ints  # in which order requests came into it


class Fleet(NamedTuple):
    """What is simulated; all `[num_replicas]` where nothing else is said."""

    costs: Costs  # of the steps of every replica
    drafts: Drafts
    requests: Requests
    seed: int  # of acceptance
    slots: Slots
    slot_draw: NDArray[np.uint64]  # of slots, random state of the request's acceptance
    num_running: Ints
    num_kv_tokens: Ints  # of all requests in the batch
    num_kv_held: Ints  # whole prompts, and what there is of replies, of those in it
    first_waiting: Ints  # head of a list through `next_waiting`
    last_waiting: Ints
    next_waiting: Ints  # `[num_requests]`
    heap_s: Floats  # when steps end; a binary heap
    heap_replica: Ints  # whose step it is
    tokens_per_step: Floats  # as its engine follows it
    max_running: Ints  # requests that may be in the coming step
    slowness: Floats  # its steps take so many times what they should
    depth: Ints  # drafter passes of the step that runs
    recent: Ints  # `[num_replicas, NUM_REMEMBERED_DRAFTS]`, blocks drafted, a ring
    num_steps: Ints  # `[num_replicas, 2]`, that drafted, and blocks in the ring ever
    # `[num_replicas, 3]`, depth, tokens that a millisecond is worth, drafts verified
    # per request.
    plan: Floats
    next_acceptance: Floats  # `[num_replicas, NUM_SAMPLES]`, of recent drafts
    events: Events  # what happened
    telemetry: Telemetry  # what the router knows of it
    prefixes: Prefixes  # what replicas have of earlier requests, and who had which
    counts: Ints  # `[10]`, by the names below
    draw: NDArray[np.uint64]  # `[1]`, random state of the router


ARRIVED, HEAPED, HAPPENED, TOLD, STEPS, REQUEST_STEPS, OPEN = range(7)
WAITS, JOINED, PREEMPTED = range(7, 10)
"""Places in `Fleet.counts`: next arrival, heap size, events so far, events told, steps
done, request-steps done, replicas that take requests: the first ones; whether the
replica on top of the heap waits for its drafts; requests that have joined a batch, and
that lost their place."""
