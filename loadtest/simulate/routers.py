"""Routers: which replica a request goes to, by what is known of them.

`ours` decides by the very functions that a front decides by
(`policies.decisions.routing`), of what a single front would know.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.compiled import compiled
from policies.decisions.routing import (
    MAX_AHEAD,
    MAX_STATE_AGE_S,
    NUM_COLUMNS,
    NUM_DRAWS,
    NUM_SAMPLED,
    fewer_of_two,
    find_best,
    fit_share,
    learn_share,
    sample_two_compiled,
)
from policies.estimators.reply_length import follow_length

from .prefixes import HOLDER_TOKENS, LOOKED_AT, Prefixes, count_known, keep
from .state import BEGUN, CAME, HAPPENED, OPEN, TOLD, Fleet, Floats, Ints, Requests

ROUND_ROBIN, LEAST_REQUESTS, POWER_OF_TWO, LEAST_SENT, TWO_SENT, OURS, PREFIX = range(7)

_LEAST_MATCH = 0.1
_MOST_UNEQUAL = 32
"""A prefix counts from this share of the prompt on, and while no replica has so many
requests more than another one. Sources: Ray Serve's `PrefixCacheAffinityRouter`, which
leaves the latter open, and `balance_abs_threshold` of SGLang's router."""

SPARE_SHARE = 8
"""As `serving.front.token_link`: one in so many seats more is filled."""


@compiled
def draw(state: NDArray[np.uint64]) -> float:
    """Return a number in [0, 1). Source: splitmix64 (Steele, Lea, Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) / 9007199254740992.0


@compiled
def note_event(
    fleet: Fleet, now_s: float, kind: int, request: int, replica: int
) -> None:
    """Write down what the router will be told when it is old enough."""
    place = fleet.counts[HAPPENED]
    fleet.counts[HAPPENED] += 1
    events = fleet.events
    events.when_s[place], events.kind[place] = now_s, kind
    events.request[place] = request
    events.tokens_per_step[place] = fleet.tokens_per_step[replica]
    events.num_running[place] = fleet.num_running[replica]
    events.num_kv_tokens[place] = fleet.num_kv_tokens[replica]


@compiled
def listen(fleet: Fleet, until_s: float) -> None:
    """Let the router know what happened until then.

    What a replica was like is told with each event there, and holds until the next.
    """
    events, known, counts = fleet.events, fleet.telemetry, fleet.counts
    requests = fleet.requests
    while counts[TOLD] < counts[HAPPENED] and events.when_s[counts[TOLD]] <= until_s:
        event = counts[TOLD]
        counts[TOLD] += 1
        request = events.request[event]
        replica = requests.replica[request]
        known.tokens_per_step[replica] = events.tokens_per_step[event]
        known.num_running[replica] = events.num_running[event]
        known.num_kv_tokens[replica] = events.num_kv_tokens[event]
        if events.kind[event] == CAME:
            known.num_there[replica] += 1
        elif events.kind[event] == BEGUN:
            known.num_prompt_tokens[replica] -= requests.num_prompt_tokens[request]
        else:
            known.num_there[replica] -= 1
            known.num_sent[replica] -= 1
            known.learnt[1] = follow_length(
                known.learnt[1], requests.num_output_tokens[request]
            )
            _look_for_seats(fleet, replica)


@compiled
def _look_for_seats(fleet: Fleet, replica: int) -> None:
    known, seats = fleet.telemetry, fleet.costs.max_num_seqs
    seats += (seats + SPARE_SHARE - 1) // SPARE_SHARE
    known.can_take[replica] = known.num_sent[replica] < seats


@compiled
def find_costs(fleet: Fleet, replica: int) -> tuple[float, float, float]:
    """Return a replica's base and its costs a request and a prompt token, ms.

    What its engine's are about its load as it is known: estimated without error.
    """
    known, costs, slowness = fleet.telemetry, fleet.costs, fleet.slowness[replica]
    running, depth = known.num_running[replica], fleet.depth[replica]
    tokens_ms = costs.token_ms * (1 + depth)
    base_ms = costs.base_ms + depth * costs.draft_pass_ms
    request_ms = costs.request_ms + depth * costs.draft_token_ms
    if tokens_ms * running < costs.floor_ms:
        base_ms += costs.floor_ms
    else:
        request_ms += tokens_ms
    request_ms += costs.kv_token_ms * known.num_kv_tokens[replica] / max(running, 1)
    return base_ms * slowness, request_ms * slowness, costs.token_ms * slowness


@compiled
def _describe(fleet: Fleet, replica: int, load: Floats) -> None:
    """Fill in what a request would meet, `[NUM_COLUMNS]`, as a front reckons."""
    known = fleet.telemetry
    base_ms, request_ms, prompt_token_ms = find_costs(fleet, replica)
    known.learnt[0] = learn_share(known.learnt[0], base_ms, request_ms)
    load[0], load[1] = fit_share(
        known.learnt[0], base_ms, request_ms, known.num_running[replica]
    )
    load[2], load[3] = prompt_token_ms, known.tokens_per_step[replica]
    load[4], load[5] = known.num_sent[replica], known.num_prompt_tokens[replica]


@compiled
def find_holder(
    prefixes: Prefixes, chain: Ints, num_prompt_tokens: int
) -> tuple[int, int]:
    """Return who holds the longest beginning of a prompt, -1 for nobody; its tokens.

    As `PrefixHolders` finds it.
    """
    size = prefixes.block_tokens
    looked_at = chain[: min(num_prompt_tokens, LOOKED_AT) // size]
    known = count_known(prefixes, prefixes.size.size - 1, looked_at)
    if known == 0:
        return -1, 0
    return int(prefixes.holder[chain[known - 1]]), known * size


@compiled
def note_holder(
    prefixes: Prefixes, chain: Ints, num_prompt_tokens: int, replica: int
) -> None:
    """Remember that a replica computes this prompt, as `PrefixHolders` does."""
    looked_at = chain[: min(num_prompt_tokens, LOOKED_AT) // prefixes.block_tokens]
    keep(prefixes, prefixes.size.size - 1, looked_at, HOLDER_TOKENS)
    prefixes.holder[looked_at] = replica


@compiled
def choose_ours(
    fleet: Fleet, num_prompt_tokens: int, holder: int = -1, num_cached: int = 0
) -> int:
    """Decide as a front does; -1 where no replica has a seat, as far as it knows.

    A front also asks for KV room.
    """
    known, count = fleet.telemetry, int(fleet.counts[OPEN])
    first, second = sample_two_compiled(known.can_take, count, known.draws)
    if first < 0:
        return -1
    third = holder if holder >= 0 and known.can_take[holder] else -1
    loads = np.empty((NUM_SAMPLED + 1, NUM_COLUMNS))
    cached = np.zeros(NUM_SAMPLED + 1, np.int64)
    found, looks = np.empty(NUM_SAMPLED + 1, np.int64), 0
    if third in (first, second):
        third = -1
    for replica in (first, second, third):
        if replica < 0:
            continue
        _describe(fleet, replica, loads[looks])
        if replica == third and loads[looks, 4] - loads[:looks, 4].min() > MAX_AHEAD:
            continue
        found[looks], cached[looks] = replica, num_cached * (replica == holder)
        looks += 1
    best = find_best(loads[:looks], cached[:looks], num_prompt_tokens, known.learnt[1])
    return int(found[best])


@compiled
def _find_least(there: Ints, count: int, start: int) -> int:
    """Look at all, from a random one on: the first of equals would get everything."""
    best = start + int(np.argmin(there[start:count]))
    if start > 0:
        before = int(np.argmin(there[:start]))
        if there[before] < there[best]:
            return before
    return best


@compiled
def chain_of(requests: Requests, request: int) -> Ints:
    """Return the blocks of a request's prompt and reply, none without names."""
    first = requests.chain_first[request : request + 2]
    return requests.chain[first[0] : first[1]]


@compiled
def route(fleet: Fleet, request: int, age_s: float, router: int) -> int:
    """Choose a replica for a request that arrives, by what was true `age_s` ago."""
    known, requests = fleet.telemetry, fleet.requests
    now_s = requests.arrival_s[request]
    listen(fleet, now_s - age_s)
    num_tokens = requests.num_prompt_tokens[request]
    chain = chain_of(requests, request)
    holder, num_cached = find_holder(fleet.prefixes, chain, num_tokens)
    replica = _choose(fleet, router, age_s, request, holder, num_cached)
    note_holder(fleet.prefixes, chain, num_tokens, replica)
    requests.replica[request] = replica
    known.num_sent[replica] += 1
    known.num_prompt_tokens[replica] += num_tokens
    _look_for_seats(fleet, replica)
    note_event(fleet, now_s, CAME, request, replica)
    return replica


@compiled
def _choose(
    fleet: Fleet, router: int, age_s: float, request: int, holder: int, num_cached: int
) -> int:
    known, count = fleet.telemetry, int(fleet.counts[OPEN])
    num_prompt_tokens = fleet.requests.num_prompt_tokens[request]
    if router == ROUND_ROBIN:
        return request % count
    if router == OURS and age_s <= MAX_STATE_AGE_S:
        for place in range(NUM_DRAWS):
            known.draws[place] = draw(fleet.draw)
        best = choose_ours(fleet, num_prompt_tokens, holder, num_cached)
        if best >= 0:
            return best
    if router == PREFIX and num_cached >= _LEAST_MATCH * num_prompt_tokens:
        sent = known.num_sent[:count]
        if sent.max() - sent.min() <= _MOST_UNEQUAL:
            return holder
    for place in range(NUM_SAMPLED):
        known.draws[place] = draw(fleet.draw)
    there = known.num_there
    if router in (LEAST_SENT, TWO_SENT, OURS, PREFIX):
        there = known.num_sent
    if router in (LEAST_REQUESTS, LEAST_SENT):
        return _find_least(there, count, int(known.draws[0] * count))
    return int(fewer_of_two(there, count, known.draws))
