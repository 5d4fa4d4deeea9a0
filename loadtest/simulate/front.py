"""A front before a simulated fleet: whose turn it is, and who is refused.

The queue, the places and the predictions are those of production
(`policies.decisions`); the front hears of everything at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from policies.decisions.deadlines import predict_finish
from policies.decisions.fairness import FairQueue, Turn, request_cost_ms
from policies.decisions.places import KeptSeats, Places, count_kept
from policies.decisions.routing import ReplicaLoad
from policies.estimators.reply_length import ReplyLength

from . import kernel, state
from .drawn import Drawn
from .engine import Engine
from .fleet import ROUTERS, make_fleet
from .routers import SPARE_SHARE, find_costs, listen
from .state import Floats, Ints

MAX_WAIT_S: Final = 30.0
"""As `serving.front.lease_queue`."""

SERVED, NO_PLACE, TOO_LATE, EXPIRED = range(4)
"""What became of a request."""


class Served(NamedTuple):
    """What a front's requests met; all `[num_requests]`."""

    outcome: Ints  # `SERVED`, `NO_PLACE`, `TOO_LATE` or `EXPIRED`
    ttft_ms: Floats  # from arrival at the front; NaN if not served
    finish_ms: Floats  # to the last token, likewise


class Front:
    """One front, its queue, and the fleet behind it."""

    def __init__(
        self,
        engine: Engine,
        drawn: Drawn,
        callers: Mapping[str, float],
        caller_of: Ints,
        num_replicas: int,
        *,
        max_queued: int,
        is_fair: bool = True,
        keeps_seats: bool = True,
        refuses: bool = True,
        never_refused: int = -1,
        seed: int = 0,
    ) -> None:
        """Have taken nothing yet.

        Args:
            engine: Of every replica.
            drawn: What arrives.
            callers: Who asks, and the deadline of each request's last token, ms; inf
                for none.
            caller_of: `[num_requests]`, index of the one that sent it.
            num_replicas: >= 1.
            max_queued: Requests of each replica that may wait.
            is_fair: Callers share by time; else first come, first served.
            keeps_seats: For callers with less than their share, as fronts do.
            refuses: Deadlines that will be missed are refused at once.
            never_refused: A request that is let in all the same.
            seed: Of acceptance and of the router.
        """
        count = drawn.arrival_s.size
        self._drawn = drawn
        self._flows = np.array([*callers])[caller_of].tolist()
        self._deadlines_ms = callers
        self._num_replicas = num_replicas
        self._is_fair, self._refuses = is_fair, refuses
        self._keeps_seats, self._kept = keeps_seats, KeptSeats()
        self._never_refused = never_refused
        self._seats = engine.costs.max_num_seqs
        spare = math.ceil(self._seats / SPARE_SHARE)
        self._num_seats = num_replicas * (self._seats + spare)
        self._num_kept = num_replicas * (spare + count_kept(self._seats))
        self._hurries = np.zeros(count, np.bool_)
        self._limit = self._num_seats + num_replicas * max_queued
        self._queue: FairQueue[int] = FairQueue(MAX_WAIT_S)
        self._places = Places(len(callers))
        self._replies = ReplyLength()
        # In the order in which the front sends them, not in that of their arrival.
        nobody = Drawn(np.full(count, np.inf), *np.ones((3, count), np.int64))
        self._fleet = make_fleet(engine, nobody, num_replicas, seed)
        self._sent = self._fleet.requests
        self._order: list[int] = []
        self._num_ended = self._num_seen = 0
        self._outcome = np.full(count, SERVED)

    def run(self) -> Served:
        """Serve all that arrives."""
        arrivals, number = self._drawn.arrival_s, 0
        while number < arrivals.size or self._queue:
            next_s = arrivals[number] if number < arrivals.size else np.inf
            if self._queue and self._fleet.counts[state.HEAPED] > 0:
                next_s = min(next_s, self._fleet.heap_s[0])
            self._advance(float(next_s))
            while number < arrivals.size and arrivals[number] <= next_s:
                self._admit(number, float(next_s))
                number += 1
            self._send(float(next_s))
        self._advance(np.inf)
        order = np.array(self._order, np.int64)
        found = Served(self._outcome, *np.full((2, arrivals.size), np.nan))
        for own, times in (
            (found.ttft_ms, self._sent.first_token_s),
            (found.finish_ms, self._sent.finish_s),
        ):
            own[order] = 1e3 * (times[: order.size] - arrivals[order])
        return found

    def _advance(self, until_s: float) -> None:
        kernel.advance(self._fleet, ROUTERS["ours"], 0.0, len(self._order), until_s)
        listen(self._fleet, until_s)
        events, happened = self._fleet.events, self._fleet.counts[state.HAPPENED]
        for place in range(self._num_seen, happened):
            if events.kind[place] == state.LEFT:
                flow = self._flows[self._order[events.request[place]]]
                tokens = self._sent.num_output_tokens[events.request[place]]
                self._replies.note(flow, int(tokens))
                self._places.free(flow)
                self._kept.free(flow)
                self._num_ended += 1
        self._num_seen = int(happened)

    def _admit(self, number: int, now_s: float) -> None:
        """As `serving.front.admission` does."""
        flow, load = self._flows[number], self._look()
        full = replace(load, num_requests=self._seats)
        num_prompt = int(self._drawn.num_prompt_tokens[number])
        expected = self._replies.expect(flow)
        cost_ms = request_cost_ms(full, num_prompt, expected)
        turn = Turn(flow if self._is_fair else "all", cost_ms)
        if not self._places.has_room(flow, self._limit):
            self._outcome[number] = NO_PLACE
            return
        hurries = self._keeps_seats and self._may_hurry(turn, now_s)
        self._hurries[number] = hurries
        num_before = 0 if hurries else len(self._queue)
        has_seat = self._count_free(number) > num_before
        predicted = predict_finish(
            load if has_seat else full,
            self._num_replicas,
            0.0 if hurries else self._queue.work_ahead_ms(turn),
            num_prompt,
            expected,
            has_seat=has_seat,
        )
        is_late = self._refuses and predicted.late_ms(self._deadlines_ms[flow]) > 0.0
        if is_late and number != self._never_refused:
            self._outcome[number] = TOO_LATE
            return
        self._places.take(flow)
        if hurries:
            self._kept.take(flow, 1.0, now_s)
        self._queue.add(number, turn, now_s, first=hurries)

    def _may_hurry(self, turn: Turn, now_s: float) -> bool:
        self._kept.note(turn.flow, turn.weight, now_s)
        num_seats = self._num_replicas * self._seats
        has_share_left = self._kept.has_share_left(turn.flow, num_seats)
        is_shared = self._kept.is_shared()
        return is_shared and has_share_left and not self._queue.is_behind(turn)

    def _count_free(self, number: int) -> int:
        free = self._num_seats - (len(self._order) - self._num_ended)
        is_shared = self._keeps_seats and self._kept.is_shared()
        is_kept = is_shared and not self._hurries[number]
        return free - self._num_kept if is_kept else free

    def _send(self, now_s: float) -> None:
        """Send what has its turn to the replicas that have a seat."""
        sent, drawn = self._sent, self._drawn
        while self._queue and self._count_free(self._queue.peek(now_s)) > 0:
            number = self._queue.pop(now_s)
            flow = self._flows[number]
            if 1e3 * (now_s - drawn.arrival_s[number]) > self._deadlines_ms[flow]:
                self._outcome[number] = EXPIRED
                self._places.free(flow)
                if self._hurries[number]:
                    self._kept.free(flow)
                continue
            if not self._hurries[number]:
                self._kept.take(flow, 1.0, now_s)
            place = len(self._order)
            self._order.append(number)
            sent.arrival_s[place] = now_s
            sent.num_prompt_tokens[place] = drawn.num_prompt_tokens[number]
            sent.num_output_tokens[place] = drawn.num_output_tokens[number]
            sent.kind[place] = drawn.kind[number]
            sent.luck[place] = number
            self._advance(now_s)

    def _look(self) -> ReplicaLoad:
        """Return the mean load of a replica."""
        known = [find_costs(self._fleet, one) for one in range(self._num_replicas)]
        base_ms, request_ms, token_ms = np.mean(known, axis=0)
        telemetry = self._fleet.telemetry
        return ReplicaLoad(
            float(base_ms),
            float(request_ms),
            float(token_ms),
            float(telemetry.tokens_per_step.mean()),
            round(float(telemetry.num_sent.mean())),
            round(float(telemetry.num_prompt_tokens.mean())),
        )
