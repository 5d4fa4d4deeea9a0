"""The event loop: replicas that step through batches, and a router before them.

Time goes from one arrival or end of a step to the next. Between two ends a replica is
not looked at, so the cost grows with steps and with the requests in them, and with the
logarithm of the replicas.
"""

from __future__ import annotations

import numpy as np

from policies.compiled import compiled
from policies.estimators.request_cost import follow_tokens

from .prefixes import count_known, keep
from .routers import chain_of, draw, note_event, route
from .selection import drafter_ms, select, target_ms
from .state import (
    ARRIVED,
    ASKED,
    BEGUN,
    HEAPED,
    JOINED,
    LEFT,
    NO_REQUEST,
    PREEMPTED,
    REQUEST_STEPS,
    STEPS,
    WAITS,
    Fleet,
    Floats,
    Ints,
)


@compiled
def _sift_down(heap_s: Floats, heap_replica: Ints, size: int) -> None:
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
    place = fleet.counts[HEAPED]
    fleet.counts[HEAPED] += 1
    while place > 0 and fleet.heap_s[(place - 1) // 2] > end_s:
        above = (place - 1) // 2
        fleet.heap_s[place] = fleet.heap_s[above]
        fleet.heap_replica[place] = fleet.heap_replica[above]
        place = above
    fleet.heap_s[place], fleet.heap_replica[place] = end_s, replica


@compiled
def vacate(fleet: Fleet, replica: int, slot: int) -> int:
    """Let a request leave its slot, which the last one takes, and return it."""
    requests, slots = fleet.requests, fleet.slots
    request = slots.request[replica, slot]
    output = slots.output[replica, slot]
    requests.num_emitted[request] = requests.num_output_tokens[request] - output
    held = requests.num_prompt_tokens[request] + requests.num_emitted[request]
    fleet.num_kv_held[replica] -= held
    fleet.num_kv_tokens[replica] -= held - slots.prompt[replica, slot]
    fleet.num_running[replica] -= 1
    last = fleet.num_running[replica]
    for column in slots:
        column[replica, slot] = column[replica, last]
    fleet.slot_draw[replica, slot] = fleet.slot_draw[replica, last]
    return int(request)


@compiled
def enqueue(fleet: Fleet, now_s: float, replica: int, request: int) -> None:
    """Let a request wait at a replica, which begins at once if it was idle."""
    fleet.next_waiting[request] = NO_REQUEST
    if fleet.first_waiting[replica] != NO_REQUEST:
        fleet.next_waiting[fleet.last_waiting[replica]] = request
    else:
        fleet.first_waiting[replica] = request
        if fleet.num_running[replica] == 0:
            _push(fleet, now_s, replica)
    fleet.last_waiting[replica] = request


@compiled
def _make_room(fleet: Fleet, replica: int) -> bool:
    """Let who joined last give way while a step has no room; return whether one did."""
    costs, gave_way = fleet.costs, False
    while fleet.num_running[replica] > 1:
        running = fleet.num_running[replica]
        num_tokens = fleet.num_kv_held[replica]
        for slot in range(running):
            if fleet.slots.prompt[replica, slot] == 0:
                num_tokens += 1 + costs.num_drafts
        if num_tokens <= costs.max_kv_tokens:
            break
        last = int(np.argmax(fleet.slots.joined[replica, :running]))
        request = vacate(fleet, replica, last)
        fleet.counts[PREEMPTED] += 1
        fleet.next_waiting[request] = fleet.first_waiting[replica]
        if fleet.first_waiting[replica] == NO_REQUEST:
            fleet.last_waiting[replica] = request
        fleet.first_waiting[replica] = request
        gave_way = True
    return gave_way


@compiled
def _fill(fleet: Fleet, replica: int) -> int:
    """Fill the batch and return how many of it decode.

    As vLLM does: those that run come first, prompts get what is left of the tokens.
    """
    requests, drafts, costs = fleet.requests, fleet.drafts, fleet.costs
    gave_way = False
    held = fleet.num_kv_held[replica]
    if held + costs.max_num_seqs * (1 + costs.num_drafts) > costs.max_kv_tokens:
        gave_way = _make_room(fleet, replica)
    prompts, chunks = fleet.slots.prompt[replica], fleet.slots.chunk[replica]
    num_decoding, left = 0, costs.max_num_batched_tokens
    for slot in range(fleet.num_running[replica]):
        if prompts[slot] == 0:
            num_decoding += 1
    left -= num_decoding * (1 + costs.num_drafts + costs.draft_slots)
    for slot in range(fleet.num_running[replica]):
        chunks[slot] = min(prompts[slot], max(left - costs.draft_slots, 0))
        if chunks[slot] > 0:
            left -= chunks[slot] + costs.draft_slots
    while (
        not gave_way
        and left > costs.draft_slots
        and fleet.num_running[replica] < fleet.max_running[replica]
        and fleet.first_waiting[replica] != NO_REQUEST
    ):
        request = fleet.first_waiting[replica]
        held = requests.num_prompt_tokens[request] + requests.num_emitted[request]
        if (
            fleet.num_running[replica] > 0
            and fleet.num_kv_held[replica] + held > costs.max_kv_tokens
        ):
            break
        cached = _find_cached(fleet, replica, request)
        if requests.num_emitted[request] == 0:
            requests.num_cached[request] = cached
        fleet.num_kv_held[replica] += held
        fleet.num_kv_tokens[replica] += cached
        fleet.first_waiting[replica] = fleet.next_waiting[request]
        slot = fleet.num_running[replica]
        fleet.num_running[replica] += 1
        fleet.slots.request[replica, slot] = request
        fleet.slots.joined[replica, slot] = fleet.counts[JOINED]
        fleet.counts[JOINED] += 1
        prompts[slot] = held - cached
        output = requests.num_output_tokens[request] - requests.num_emitted[request]
        fleet.slots.output[replica, slot] = output
        # Of the request alone: it is as lucky wherever it runs, so arms are paired.
        fleet.slot_draw[replica, slot] = np.uint64(fleet.seed) ^ (
            np.uint64(requests.luck[request] + 1) * np.uint64(0xD1342543DE82EF95)
        )
        kind = requests.kind[request]
        first, end = drafts.first[kind], drafts.first[kind + 1]
        if end - first > 1:
            luck = draw(fleet.slot_draw[replica, slot : slot + 1])
            first += int(luck * (end - first))
        fleet.slots.block[replica, slot] = first
        chunks[slot] = min(prompts[slot], left - costs.draft_slots)
        left -= chunks[slot] + costs.draft_slots
    return num_decoding


@compiled
def _find_cached(fleet: Fleet, replica: int, request: int) -> int:
    """Return how much of a request that joins is there, one token being computed."""
    requests, size = fleet.requests, fleet.prefixes.block_tokens
    chain = chain_of(requests, request)
    if chain.size == 0:
        return 0
    held = requests.num_prompt_tokens[request] + requests.num_emitted[request]
    known = count_known(fleet.prefixes, replica, chain[: (held - 1) // size])
    room = fleet.costs.max_kv_tokens - fleet.num_kv_held[replica] - held
    keep(fleet.prefixes, replica, chain[:known], room)
    return int(known * size)


@compiled
def _start(fleet: Fleet, replica: int) -> float:
    """Return how long the step takes whose batch and drafts are chosen, s."""
    costs = fleet.costs
    num_decoding, num_tokens, num_prompt_tokens = 0, 0, 0
    for slot in range(fleet.num_running[replica]):
        num_prompt_tokens += fleet.slots.chunk[replica, slot]
        if fleet.slots.prompt[replica, slot] == 0:
            num_decoding += 1
            num_tokens += 1 + fleet.slots.drafts[replica, slot]
    fleet.counts[STEPS] += 1
    fleet.counts[REQUEST_STEPS] += fleet.num_running[replica]
    fleet.num_kv_tokens[replica] += num_prompt_tokens
    step_ms = costs.base_ms + costs.request_ms * num_decoding
    step_ms += target_ms(costs, num_tokens + num_prompt_tokens)
    step_ms += drafter_ms(costs, fleet.depth[replica], num_decoding)
    step_ms += costs.kv_token_ms * fleet.num_kv_tokens[replica]
    others = fleet.num_running.size - 1
    if others > 0:
        step_ms *= 1.0 + costs.contention * (fleet.counts[HEAPED] - 1) / others
    return float(step_ms * fleet.slowness[replica]) / 1000.0


@compiled
def _end_step(fleet: Fleet, replica: int, now_s: float) -> None:
    """Hand out what the step has computed, and let go who is done."""
    requests, drafts, slot = fleet.requests, fleet.drafts, 0
    prompts, outputs = fleet.slots.prompt[replica], fleet.slots.output[replica]
    chunks, draws = fleet.slots.chunk[replica], fleet.slot_draw[replica]
    members, verified = fleet.slots.request[replica], fleet.slots.drafts[replica]
    blocks = fleet.slots.block[replica]
    num_emitting, num_accepted = 0, 0
    while slot < fleet.num_running[replica]:
        request = members[slot]
        if prompts[slot] > 0:
            prompts[slot] -= chunks[slot]
            if prompts[slot] > 0:
                slot += 1
                continue
            num_tokens = 1
            if np.isnan(requests.first_token_s[request]):
                requests.first_token_s[request] = now_s
                note_event(fleet, now_s, BEGUN, request, replica)
            elif np.isnan(requests.resumed_s[request]):
                requests.resumed_s[request] = now_s
        else:
            num_tokens, block = 1, blocks[slot]
            if drafts.num_accepted[block] >= 0:
                num_tokens += min(verified[slot], drafts.num_accepted[block])
            else:
                luck, survival = draw(draws[slot : slot + 1]), drafts.survival[block]
                while num_tokens <= verified[slot] and luck < survival[num_tokens - 1]:
                    num_tokens += 1
            num_tokens = min(num_tokens, outputs[slot])
            kind = requests.kind[request]
            blocks[slot] += 1
            if blocks[slot] == drafts.first[kind + 1]:
                blocks[slot] = drafts.first[kind]
        num_emitting += 1
        num_accepted += num_tokens - 1
        outputs[slot] -= num_tokens
        fleet.num_kv_tokens[replica] += num_tokens
        fleet.num_kv_held[replica] += num_tokens
        if outputs[slot] > 0:
            slot += 1
            continue
        requests.finish_s[request] = now_s
        requests.num_finishes[request] += 1
        vacate(fleet, replica, slot)
        note_event(fleet, now_s, LEFT, request, replica)
        chain = chain_of(requests, request)
        if chain.size:
            room = fleet.costs.max_kv_tokens - fleet.num_kv_held[replica]
            keep(fleet.prefixes, replica, chain, room)
    if num_emitting > 0:
        fleet.tokens_per_step[replica] = follow_tokens(
            fleet.tokens_per_step[replica], num_emitting, num_accepted
        )


@compiled
def advance(
    fleet: Fleet, router: int, age_s: float, last_arrival: int, until_s: float
) -> int:
    """Go on until `last_arrival` requests have arrived; to the end if that is all.

    Args:
        fleet: Changed in place.
        router: One of the constants of `routers`.
        age_s: How old what the router knows of a replica is, >= 0.
        last_arrival: 1 to the number of requests.
        until_s: Stop before what comes later.

    Returns:
        -1; where drafts are `ASKED` for, the replica whose `depth` and `slots.drafts`
        must be set before it is called again.
    """
    counts, arrivals_s = fleet.counts, fleet.requests.arrival_s
    num_requests = arrivals_s.size
    while True:
        arrival_s = np.inf
        if counts[ARRIVED] < num_requests:
            arrival_s = arrivals_s[counts[ARRIVED]]
        next_s = fleet.heap_s[0] if counts[HEAPED] > 0 else np.inf
        if counts[WAITS] == 0:
            if min(arrival_s, next_s) > until_s:
                return -1
            if next_s <= arrival_s and counts[HEAPED] > 0:
                replica = fleet.heap_replica[0]
                _end_step(fleet, replica, next_s)
            else:
                if counts[ARRIVED] == min(num_requests, last_arrival):
                    return -1
                request = counts[ARRIVED]
                counts[ARRIVED] += 1
                replica = route(fleet, request, age_s, router)
                enqueue(fleet, arrival_s, replica, request)
                continue
            num_decoding = _fill(fleet, replica)
            if fleet.costs.rule == ASKED and num_decoding > 0:
                counts[WAITS] = 1
                return int(replica)
            if fleet.num_running[replica] > 0:
                select(fleet, replica)
        counts[WAITS] = 0
        replica = fleet.heap_replica[0]
        if fleet.num_running[replica] > 0:
            fleet.heap_s[0] += _start(fleet, replica)
        else:
            counts[HEAPED] -= 1
            fleet.heap_s[0] = fleet.heap_s[counts[HEAPED]]
            fleet.heap_replica[0] = fleet.heap_replica[counts[HEAPED]]
        _sift_down(fleet.heap_s, fleet.heap_replica, counts[HEAPED])
