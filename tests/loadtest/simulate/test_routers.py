"""The simulated router decides as a real front does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self, cast

import numpy as np
import pytest

from loadtest.simulate.drawn import Drawn
from loadtest.simulate.engine import load_engine
from loadtest.simulate.fleet import Targets, make_fleet, measure, run_fleet
from loadtest.simulate.load import Load, draw_requests
from loadtest.simulate.routers import choose_ours, find_costs, find_holder, note_holder
from policies.decisions.routing import NUM_DRAWS, NUM_SAMPLED, fewer_of_two
from policies.estimators.reply_length import ReplyLength
from serving.front.in_flight import InFlight
from serving.front.link_load import LinkLoad
from serving.front.routing import Routing
from serving.replica.token_channel import ReplicaState

NUM_SEATS = 32


class Links(list[SimpleNamespace]):
    """Token links without their sockets: all that a front is connected to."""

    @property
    def all(self) -> Self:
        return self

    def find(self, replica: str) -> SimpleNamespace:
        return self[int(replica)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 64])
def test_both_worlds_choose_the_same_replica(num_replicas: int) -> None:
    """Random states; requests in flight count as they come, up to the last seat."""
    rng = np.random.default_rng(num_replicas)
    engine = load_engine("h100-qwen3-1.7b", 3, NUM_SEATS)
    nobody = Drawn(np.zeros(0), *np.zeros((3, 0), np.int64), chain=np.arange(5 * 20))
    for _ in range(40):
        fleet = make_fleet(engine, nobody, num_replicas, 0)
        prefixes, known = fleet.prefixes, fleet.telemetry
        fleet.depth[:] = rng.integers(0, 4, num_replicas)
        fleet.slowness[:] = rng.uniform(1, 3, num_replicas)
        known.num_sent[:] = known.num_running[:] = rng.integers(0, 33, num_replicas)
        known.num_prompt_tokens[:] = rng.integers(0, 3000, num_replicas)
        known.num_kv_tokens[:] = known.num_running * rng.integers(100, 4000)
        known.tokens_per_step[:] = rng.uniform(1, 4, num_replicas)
        links = Links()
        for replica in range(num_replicas):
            terms = find_costs(fleet, replica)
            running = int(known.num_running[replica])
            state = ReplicaState(
                num_running=running,
                num_free_kv_tokens=10**9,
                base_ms=terms[0],
                request_ms=terms[1],
                prompt_token_ms=terms[2],
                tokens_per_step=float(known.tokens_per_step[replica]),
            )
            load = LinkLoad(NUM_SEATS)
            load.num_held = int(rng.integers(0, running + 1))
            load.num_prompt_tokens = int(known.num_prompt_tokens[replica])
            load.take(state)
            links.append(
                SimpleNamespace(
                    offer=SimpleNamespace(
                        serve_id=str(replica), replica=str(replica), num_seats=NUM_SEATS
                    ),
                    state=state,
                    load=load,
                    heard_s=0.0,
                )
            )
        numbers: Iterator[float] = iter(())
        routing = Routing(
            cast(Any, links),
            running_ids=lambda: None,
            replies=ReplyLength(),
            draw=lambda: next(numbers),  # noqa: B023
            clock=lambda: 0.0,
        )
        for _ in range(40):
            known.draws[:] = rng.random(NUM_DRAWS)
            late = rng.random(NUM_SAMPLED)
            numbers = iter([*known.draws, *late])
            # Five sessions, told apart by their tokens, and as far as they have got.
            session, num_blocks = rng.integers(0, 5), rng.integers(0, 20)
            chain = session * 20 + np.arange(num_blocks)
            num_tokens = 128 * num_blocks + 9
            one = InFlight(
                SimpleNamespace(prompt_token_ids=[int(session)] * num_tokens),
                emitted=[0] * int(rng.integers(0, 2000)),
            )
            held = find_holder(prefixes, chain, num_tokens)
            chosen = choose_ours(fleet, one.num_tokens, *held)
            if chosen < 0:
                chosen = fewer_of_two(known.num_sent, num_replicas, late)
            assert routing.choose(one) == str(chosen)
            note_holder(prefixes, chain, num_tokens, chosen)
            known.num_sent[chosen] += 1
            known.num_prompt_tokens[chosen] += one.num_tokens
            known.can_take[chosen] = known.num_sent[chosen] < 36


@pytest.mark.parametrize("age_s", [0.5, 1.0, 10.0])
def test_with_late_telemetry_ours_is_no_worse_than_a_count(age_s: float) -> None:
    """Of ended replies it hears late: then every seat seems to be taken."""
    engine = load_engine("h100-qwen3-1.7b", 3)
    load = Load()
    requests = draw_requests(load, 20_000, 0.8 * 8 * engine.capacity_per_s(load), 0)
    good = [
        measure(
            run_fleet(engine, requests, 8, router, age_s, 0).requests, Targets(100, 5)
        )["attainment"]
        for router in ("power-of-two-sent", "ours")
    ]
    assert good[1] > good[0] - 0.005
