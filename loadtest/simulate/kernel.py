"""The event loop: replicas that step through batches, and a router before them.

Time goes from one arrival or end of a step to the next. Between two ends a replica is
not looked at, so the cost grows with steps and with the requests in them, and with the
logarithm of the replicas. All compiled code is in this file, whose machine code is
renewed when it changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.compiled import compiled

ROUND_ROBIN, LEAST_REQUESTS, POWER_OF_TWO = 0, 1, 2
_NO_REQUEST = -1


class Costs(NamedTuple):
    """What a step takes, ms, at one draft length.

    `base + request * requests + max(floor, token * tokens) + kv_token * KV tokens`.

    Attributes:
        base_ms: Of every step, the drafter's passes included.
        request_ms: Of each request in it that decodes.
        token_ms: Of each token that the target computes.
        floor_ms: That the tokens take at least: reading the weights.
        kv_token_ms: Of each token that is attended to.
        pad_multiple: Tokens are padded to a multiple of it, for CUDA graphs; 1 for no
            padding.
        pad_limit: Beyond it nothing is padded.
        num_drafts: That each decoding request verifies in each step.
        max_num_seqs: Requests in a step at most.
        max_num_batched_tokens: Tokens in a step at most; prompts come in chunks.
    """

    base_ms: float
    request_ms: float
    token_ms: float
    floor_ms: float
    kv_token_ms: float
    pad_multiple: int
    pad_limit: int
    num_drafts: int
    max_num_seqs: int
    max_num_batched_tokens: int


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


class Fleet(NamedTuple):
    """State between two calls.

    Attributes:
        slot_request: `[num_replicas, max_num_seqs]`, requests in the batch.
        slot_prompt: Same shape, prompt tokens still to compute.
        slot_chunk: Same shape, those in the step that runs.
        slot_output: Same shape, tokens still to emit.
        slot_draw: Same shape, uint64, random state of the request's acceptance.
        num_running: `[num_replicas]`.
        num_kv_tokens: `[num_replicas]`, of all requests in the batch.
        first_waiting: `[num_replicas]`, head of a list through `next_waiting`.
        last_waiting: `[num_replicas]`.
        next_waiting: `[num_requests]`.
        heap_s: `[num_replicas]`, when steps end; a binary heap.
        heap_replica: `[num_replicas]`, whose step it is.
        known: `[num_replicas]`, requests there as the router knows it.
        change_s: `[2 * num_requests]`, when requests came to a replica or left it.
        change: Same shape, replica + 1, below 0 if it left.
        counts: Next arrival, heap size, changes made, changes known, steps done,
            request-steps done, next of round robin.
        draw: `[1]`, uint64, random state of the router.
    """

    slot_request: NDArray[np.int64]
    slot_prompt: NDArray[np.int64]
    slot_chunk: NDArray[np.int64]
    slot_output: NDArray[np.int64]
    slot_draw: NDArray[np.uint64]
    num_running: NDArray[np.int64]
    num_kv_tokens: NDArray[np.int64]
    first_waiting: NDArray[np.int64]
    last_waiting: NDArray[np.int64]
    next_waiting: NDArray[np.int64]
    heap_s: NDArray[np.float64]
    heap_replica: NDArray[np.int64]
    known: NDArray[np.int64]
    change_s: NDArray[np.float64]
    change: NDArray[np.int64]
    counts: NDArray[np.int64]
    draw: NDArray[np.uint64]


_ARRIVED, _HEAPED, _CHANGED, _KNOWN, STEPS, REQUEST_STEPS, _TURN = range(7)
"""Places in `Fleet.counts`."""


def make_fleet(
    num_replicas: int, max_num_seqs: int, num_requests: int, seed: int
) -> Fleet:
    """Return an idle fleet."""
    slots = (num_replicas, max_num_seqs)
    return Fleet(
        slot_request=np.zeros(slots, np.int64),
        slot_prompt=np.zeros(slots, np.int64),
        slot_chunk=np.zeros(slots, np.int64),
        slot_output=np.zeros(slots, np.int64),
        slot_draw=np.zeros(slots, np.uint64),
        num_running=np.zeros(num_replicas, np.int64),
        num_kv_tokens=np.zeros(num_replicas, np.int64),
        first_waiting=np.full(num_replicas, _NO_REQUEST, np.int64),
        last_waiting=np.full(num_replicas, _NO_REQUEST, np.int64),
        next_waiting=np.full(num_requests, _NO_REQUEST, np.int64),
        heap_s=np.zeros(num_replicas),
        heap_replica=np.zeros(num_replicas, np.int64),
        known=np.zeros(num_replicas, np.int64),
        change_s=np.zeros(2 * num_requests),
        change=np.zeros(2 * num_requests, np.int64),
        counts=np.zeros(7, np.int64),
        draw=np.array([seed], np.uint64),
    )


@compiled
def _draw(state: NDArray[np.uint64]) -> float:
    """Return a number in [0, 1). Source: splitmix64 (Steele, Lea, Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) / 9007199254740992.0


@compiled
def _sift_down(
    heap_s: NDArray[np.float64], heap_replica: NDArray[np.int64], size: int
) -> None:
    """Let the top of the heap sink to its place."""
    end_s, replica, place = heap_s[0], heap_replica[0], 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap_s[child + 1] < heap_s[child]:
            child += 1
        if heap_s[child] >= end_s:
            break
        heap_s[place], heap_replica[place] = heap_s[child], heap_replica[child]
        place = child
    heap_s[place], heap_replica[place] = end_s, replica


@compiled
def _push(fleet: Fleet, end_s: float, replica: int) -> None:
    """Add a step to the heap."""
    place = fleet.counts[_HEAPED]
    fleet.counts[_HEAPED] += 1
    while place > 0 and fleet.heap_s[(place - 1) // 2] > end_s:
        above = (place - 1) // 2
        fleet.heap_s[place] = fleet.heap_s[above]
        fleet.heap_replica[place] = fleet.heap_replica[above]
        place = above
    fleet.heap_s[place], fleet.heap_replica[place] = end_s, replica


@compiled
def _note_change(fleet: Fleet, now_s: float, change: int) -> None:
    """Write down what the router will learn when it is old enough."""
    fleet.change_s[fleet.counts[_CHANGED]] = now_s
    fleet.change[fleet.counts[_CHANGED]] = change
    fleet.counts[_CHANGED] += 1


@compiled
def _route(fleet: Fleet, now_s: float, age_s: float, router: int) -> int:
    """Choose a replica by what was true `age_s` ago."""
    counts = fleet.counts
    while (
        counts[_KNOWN] < counts[_CHANGED]
        and fleet.change_s[counts[_KNOWN]] <= now_s - age_s
    ):
        change = fleet.change[counts[_KNOWN]]
        if change > 0:
            fleet.known[change - 1] += 1
        else:
            fleet.known[-change - 1] -= 1
        counts[_KNOWN] += 1
    num_replicas = fleet.known.size
    if router == ROUND_ROBIN:
        best = int(counts[_TURN])
        counts[_TURN] = (best + 1) % num_replicas
        return best
    best = int(_draw(fleet.draw) * num_replicas)
    if router == POWER_OF_TWO:
        if num_replicas > 1:
            other = int(_draw(fleet.draw) * (num_replicas - 1))
            other += other >= best
            if fleet.known[other] < fleet.known[best]:
                best = other
        return best
    # From a random one on: the first of equals would get all that is not known yet.
    start = best
    for offset in range(1, num_replicas):
        replica = start + offset
        if replica >= num_replicas:
            replica -= num_replicas
        if fleet.known[replica] < fleet.known[best]:
            best = replica
    return best


@compiled
def _start_step(
    fleet: Fleet, requests: Requests, costs: Costs, replica: int, seed: int
) -> float:
    """Fill the batch and return how long its step takes, s; 0 with nothing to do.

    As vLLM does: those that run come first, prompts get what is left of the tokens.
    """
    prompts, chunks = fleet.slot_prompt[replica], fleet.slot_chunk[replica]
    num_decoding, left = 0, costs.max_num_batched_tokens
    for slot in range(fleet.num_running[replica]):
        if prompts[slot] == 0:
            num_decoding += 1
    left -= num_decoding * (1 + costs.num_drafts)
    num_prompt_tokens = 0
    for slot in range(fleet.num_running[replica]):
        chunks[slot] = min(prompts[slot], max(left, 0))
        left -= chunks[slot]
        num_prompt_tokens += chunks[slot]
    while (
        left > 0
        and fleet.num_running[replica] < costs.max_num_seqs
        and fleet.first_waiting[replica] != _NO_REQUEST
    ):
        request = fleet.first_waiting[replica]
        fleet.first_waiting[replica] = fleet.next_waiting[request]
        slot = fleet.num_running[replica]
        fleet.num_running[replica] += 1
        fleet.slot_request[replica, slot] = request
        prompts[slot] = requests.num_prompt_tokens[request]
        fleet.slot_output[replica, slot] = requests.num_output_tokens[request]
        # Of the request alone: it is as lucky wherever it runs, so arms are paired.
        fleet.slot_draw[replica, slot] = np.uint64(seed) ^ (
            np.uint64(request + 1) * np.uint64(0xD1342543DE82EF95)
        )
        chunks[slot] = min(prompts[slot], left)
        left -= chunks[slot]
        num_prompt_tokens += chunks[slot]
    if fleet.num_running[replica] == 0:
        return 0.0
    fleet.counts[STEPS] += 1
    fleet.counts[REQUEST_STEPS] += fleet.num_running[replica]
    num_tokens = num_decoding * (1 + costs.num_drafts) + num_prompt_tokens
    if num_tokens <= costs.pad_limit:
        padding = costs.pad_multiple
        num_tokens = (num_tokens + padding - 1) // padding * padding
    fleet.num_kv_tokens[replica] += num_prompt_tokens
    step_ms = costs.base_ms + costs.request_ms * num_decoding
    step_ms += max(costs.floor_ms, costs.token_ms * num_tokens)
    step_ms += costs.kv_token_ms * fleet.num_kv_tokens[replica]
    return float(step_ms) / 1000.0


@compiled
def _end_step(
    fleet: Fleet,
    requests: Requests,
    survival: NDArray[np.float64],
    replica: int,
    now_s: float,
) -> None:
    """Hand out what the step has computed, and let go who is done."""
    slot = 0
    prompts, outputs = fleet.slot_prompt[replica], fleet.slot_output[replica]
    chunks, draws = fleet.slot_chunk[replica], fleet.slot_draw[replica]
    members = fleet.slot_request[replica]
    num_drafts = survival.shape[1]
    while slot < fleet.num_running[replica]:
        request = members[slot]
        if prompts[slot] > 0:
            prompts[slot] -= chunks[slot]
            if prompts[slot] > 0:
                slot += 1
                continue
            num_tokens = 1
            requests.first_token_s[request] = now_s
        else:
            luck, num_tokens = _draw(draws[slot : slot + 1]), 1
            kind = requests.kind[request]
            while num_tokens <= num_drafts and luck < survival[kind, num_tokens - 1]:
                num_tokens += 1
            num_tokens = min(num_tokens, outputs[slot])
        outputs[slot] -= num_tokens
        fleet.num_kv_tokens[replica] += num_tokens
        if outputs[slot] > 0:
            slot += 1
            continue
        requests.finish_s[request] = now_s
        requests.num_finishes[request] += 1
        fleet.num_kv_tokens[replica] -= (
            requests.num_prompt_tokens[request] + requests.num_output_tokens[request]
        )
        _note_change(fleet, now_s, -replica - 1)
        fleet.num_running[replica] -= 1
        last = fleet.num_running[replica]
        members[slot], prompts[slot] = members[last], prompts[last]
        outputs[slot], chunks[slot] = outputs[last], chunks[last]
        draws[slot] = draws[last]


@compiled
def advance(
    fleet: Fleet,
    requests: Requests,
    costs: Costs,
    survival: NDArray[np.float64],
    router: int,
    age_s: float,
    seed: int,
    last_arrival: int,
) -> None:
    """Go on until `last_arrival` requests have arrived; to the end if that is all.

    Args:
        fleet: Changed in place.
        requests: Likewise.
        costs: Of a step.
        survival: `[num_kinds, num_drafts]`, float64, chance that a kind's drafts are
            accepted up to a position; falls along a row.
        router: One of the constants of this module.
        age_s: How old what the router knows of a replica is, >= 0.
        seed: Of acceptance.
        last_arrival: 1 to the number of requests.
    """
    counts = fleet.counts
    num_requests = requests.arrival_s.size
    while True:
        arrival_s = np.inf
        if counts[_ARRIVED] < num_requests:
            arrival_s = requests.arrival_s[counts[_ARRIVED]]
        if counts[_HEAPED] > 0 and fleet.heap_s[0] <= arrival_s:
            now_s, replica = fleet.heap_s[0], fleet.heap_replica[0]
            _end_step(fleet, requests, survival, replica, now_s)
            step_s = _start_step(fleet, requests, costs, replica, seed)
            if step_s > 0.0:
                fleet.heap_s[0] = now_s + step_s
            else:
                counts[_HEAPED] -= 1
                fleet.heap_s[0] = fleet.heap_s[counts[_HEAPED]]
                fleet.heap_replica[0] = fleet.heap_replica[counts[_HEAPED]]
            _sift_down(fleet.heap_s, fleet.heap_replica, counts[_HEAPED])
            continue
        if counts[_ARRIVED] == num_requests or counts[_ARRIVED] == last_arrival:
            return
        request = counts[_ARRIVED]
        counts[_ARRIVED] += 1
        replica = _route(fleet, arrival_s, age_s, router)
        requests.replica[request] = replica
        requests.seen[request] = fleet.known[replica]
        _note_change(fleet, arrival_s, replica + 1)
        if fleet.first_waiting[replica] == _NO_REQUEST:
            fleet.first_waiting[replica] = request
        else:
            fleet.next_waiting[fleet.last_waiting[replica]] = request
        fleet.last_waiting[replica] = request
        if fleet.num_running[replica] == 0:
            step_s = _start_step(fleet, requests, costs, replica, seed)
            _push(fleet, arrival_s + step_s, replica)
