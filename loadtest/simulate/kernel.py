"""The event loop: replicas that step through batches, and a router before them.

Time goes from one arrival or end of a step to the next. Between two ends a replica is
not looked at, so the cost grows with steps and with the requests in them, and with the
logarithm of the replicas.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.compiled import compiled
from policies.estimators.request_cost import follow_tokens

from .routers import draw, note_event, route
from .selection import note_step, select, tokens_ms
from .state import (
    ARRIVED,
    BEGUN,
    HEAPED,
    LEFT,
    NO_REQUEST,
    REQUEST_STEPS,
    STEPS,
    Costs,
    Fleet,
    Requests,
)


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
    place = fleet.counts[HEAPED]
    fleet.counts[HEAPED] += 1
    while place > 0 and fleet.heap_s[(place - 1) // 2] > end_s:
        above = (place - 1) // 2
        fleet.heap_s[place] = fleet.heap_s[above]
        fleet.heap_replica[place] = fleet.heap_replica[above]
        place = above
    fleet.heap_s[place], fleet.heap_replica[place] = end_s, replica


@compiled
def _start_step(
    fleet: Fleet,
    requests: Requests,
    costs: Costs,
    survival: NDArray[np.float64],
    replica: int,
    seed: int,
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
        and fleet.first_waiting[replica] != NO_REQUEST
    ):
        request = fleet.first_waiting[replica]
        promised = requests.num_prompt_tokens[request]
        promised += requests.num_output_tokens[request]
        if (
            fleet.num_running[replica] > 0
            and fleet.num_kv_promised[replica] + promised > costs.max_kv_tokens
        ):
            break
        fleet.num_kv_promised[replica] += promised
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
    num_tokens = num_decoding + num_prompt_tokens
    num_tokens += select(fleet, requests, costs, survival, replica, num_tokens)
    fleet.num_kv_tokens[replica] += num_prompt_tokens
    step_ms = costs.base_ms + costs.request_ms * num_decoding
    step_ms += tokens_ms(costs, num_tokens)
    step_ms += costs.kv_token_ms * fleet.num_kv_tokens[replica]
    fleet.step_ms[replica] = step_ms * fleet.slowness[replica]
    return float(fleet.step_ms[replica]) / 1000.0


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
    members, verified = fleet.slot_request[replica], fleet.slot_drafts[replica]
    num_tokens_out, num_emitting, num_accepted = 0, 0, 0
    while slot < fleet.num_running[replica]:
        request = members[slot]
        if prompts[slot] > 0:
            prompts[slot] -= chunks[slot]
            if prompts[slot] > 0:
                slot += 1
                continue
            num_tokens = 1
            requests.first_token_s[request] = now_s
            note_event(fleet, now_s, BEGUN, request, replica)
        else:
            luck, num_tokens = draw(draws[slot : slot + 1]), 1
            kind = requests.kind[request]
            while (
                num_tokens <= verified[slot] and luck < survival[kind, num_tokens - 1]
            ):
                num_tokens += 1
            num_tokens = min(num_tokens, outputs[slot])
        num_emitting += 1
        num_tokens_out += num_tokens
        num_accepted += num_tokens - 1
        outputs[slot] -= num_tokens
        fleet.num_kv_tokens[replica] += num_tokens
        if outputs[slot] > 0:
            slot += 1
            continue
        requests.finish_s[request] = now_s
        requests.num_finishes[request] += 1
        promised = requests.num_prompt_tokens[request]
        promised += requests.num_output_tokens[request]
        fleet.num_kv_tokens[replica] -= promised
        fleet.num_kv_promised[replica] -= promised
        fleet.num_running[replica] -= 1
        note_event(fleet, now_s, LEFT, request, replica)
        last = fleet.num_running[replica]
        members[slot], prompts[slot] = members[last], prompts[last]
        outputs[slot], chunks[slot] = outputs[last], chunks[last]
        draws[slot], verified[slot] = draws[last], verified[last]
    note_step(fleet, replica, num_tokens_out)
    if num_emitting > 0:
        fleet.tokens_per_step[replica] = follow_tokens(
            fleet.tokens_per_step[replica], num_emitting, num_accepted
        )


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
    until_s: float,
) -> None:
    """Go on until `last_arrival` requests have arrived; to the end if that is all.

    Args:
        fleet: Changed in place.
        requests: Likewise.
        costs: Of a step.
        survival: `[num_kinds, num_drafts]`, float64, chance that a kind's drafts are
            accepted up to a position; falls along a row.
        router: One of the constants of `routers`.
        age_s: How old what the router knows of a replica is, >= 0.
        seed: Of acceptance.
        last_arrival: 1 to the number of requests.
        until_s: Stop before what comes later.
    """
    counts = fleet.counts
    num_requests = requests.arrival_s.size
    while True:
        arrival_s = np.inf
        if counts[ARRIVED] < num_requests:
            arrival_s = requests.arrival_s[counts[ARRIVED]]
        if min(arrival_s, fleet.heap_s[0] if counts[HEAPED] > 0 else np.inf) > until_s:
            return
        if counts[HEAPED] > 0 and fleet.heap_s[0] <= arrival_s:
            now_s, replica = fleet.heap_s[0], fleet.heap_replica[0]
            _end_step(fleet, requests, survival, replica, now_s)
            step_s = _start_step(fleet, requests, costs, survival, replica, seed)
            if step_s > 0.0:
                fleet.heap_s[0] = now_s + step_s
            else:
                counts[HEAPED] -= 1
                fleet.heap_s[0] = fleet.heap_s[counts[HEAPED]]
                fleet.heap_replica[0] = fleet.heap_replica[counts[HEAPED]]
            _sift_down(fleet.heap_s, fleet.heap_replica, counts[HEAPED])
            continue
        if counts[ARRIVED] == num_requests or counts[ARRIVED] == last_arrival:
            return
        request = counts[ARRIVED]
        counts[ARRIVED] += 1
        replica = route(fleet, requests, costs, request, age_s, router)
        if fleet.first_waiting[replica] == NO_REQUEST:
            fleet.first_waiting[replica] = request
        else:
            fleet.next_waiting[fleet.last_waiting[replica]] = request
        fleet.last_waiting[replica] = request
        if fleet.num_running[replica] == 0:
            step_s = _start_step(fleet, requests, costs, survival, replica, seed)
            _push(fleet, arrival_s + step_s, replica)
