"""Re-prefill storms: a replica dies, and the others go on with its streams.

A front queues, paces and chooses by `policies.decisions`, and hears of every step at
the next tick; replicas are the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from loadtest.page import to_table
from policies.decisions.fairness import FairQueue, Turn
from policies.decisions.refill import Refills
from policies.decisions.routing import NUM_DRAWS, NUM_SAMPLED, fewer_of_two

from . import kernel, state
from .compare import expect, make_ticker
from .engine import Engine, load_engine
from .fleet import ROUTERS, make_fleet
from .load import Lengths, Load, draw_requests
from .output import join_parts
from .routers import choose_ours

ARMS: Final = ("nobody dies", "paced", "by seats", "at once")
"""Replays go as far as there is KV room, as fronts do; as any request does, where there
are seats; without waiting for anything."""

TTFT_MS: Final = 500.0
TPOT_MS: Final = 30.0

_TICK_S: Final = 0.005
_UNSETTLED: Final = 8
"""As `serving.front.credit.MAX_UNSETTLED`; a lease settles within a tick."""

_DEATH_S: Final = 25.0
_END_S: Final = 45.0
"""Of the arrivals that are looked at; more come for another 2 s."""

_STORM_S: Final = 2.0
"""Neighbours are what is there in this time after the death."""

_WINDOW_S: Final = 0.25
_NORMAL: Final = 0.95
_BASE_MS: Final = 20.0
"""Of a step: a larger model's, for a small one's would be overloaded by 256 streams."""

_LOAD: Final = Load(prompt=Lengths(300, 0.5), output=Lengths(400, 0.5))
_STREAMS: Final = 256
_CONTEXT: Final = 550
"""Tokens of a stream on average, as these lengths have it."""

_RATE_PER_S: Final = 32.0
"""Of requests, for each replica."""

_CELLS: Final = ((8, 0.7), (8, 0.85), (3, 0.6), (3, 0.7))
"""Replicas, and the share of their KV room that is taken before one dies."""

_SEEDS: Final = 3

_COLUMNS: Final = {
    "lost": "streams lost",
    "stall_p50_ms": "stall p50, ms",
    "stall_p99_ms": "stall p99, ms",
    "ttft_attainment": f"TTFT <= {TTFT_MS:g} ms, %",
    "ttft_p99_ms": "TTFT p99, ms",
    "tpot_attainment": f"TPOT <= {TPOT_MS:g} ms, %",
    "tpot_p99_ms": "TPOT p99, ms",
    "preemptions": "preemptions",
    "normal_s": "normal after, s",
}


class Storm:
    """One run."""

    def __init__(self, engine: Engine, num_replicas: int, arm: str, seed: int) -> None:
        """Draw what arrives.

        Args:
            engine: Of every replica.
            num_replicas: Before one dies.
            arm: One of `ARMS`.
            seed: Of requests, choices and acceptance.
        """
        self._arm, self._room = arm, engine.costs.max_kv_tokens
        self._seats = engine.costs.max_num_seqs * 9 // 8
        rate_per_s = _RATE_PER_S * num_replicas
        count = int(rate_per_s * (_END_S + 2.0))
        drawn = draw_requests(_LOAD, count, rate_per_s, seed)
        self._fleet = make_fleet(engine, drawn, num_replicas, seed)
        self._requests = self._fleet.requests
        # The front says what goes where.
        self._fleet.counts[state.ARRIVED] = count
        self._queue: FairQueue[int] = FairQueue(30.0)
        self._refills, self._num_alive = Refills(), num_replicas
        self._known = self._fleet.telemetry
        self._known.learnt[1] = _LOAD.output.mean
        self._draw = np.random.default_rng(seed).random
        self._unbegun: dict[int, tuple[int, int]] = {}
        self._lost = np.zeros(count, np.bool_)

    def run(self) -> dict[str, float]:
        """Run to the end and return what was measured, ms, s and shares."""
        requests, arrived, now_s, before = self._requests, 0, 0.0, 0
        while not requests.num_finishes.all():
            now_s += _TICK_S
            kernel.advance(self._fleet, ROUTERS["round-robin"], 0.0, 1, now_s)
            self._listen()
            if now_s - _TICK_S < _DEATH_S <= now_s:
                before = int(self._fleet.counts[state.PREEMPTED])
                if self._arm != ARMS[0]:
                    self._kill_last(now_s)
            while (
                arrived < requests.arrival_s.size
                and requests.arrival_s[arrived] <= now_s
            ):
                self._wait(arrived, now_s)
                arrived += 1
            self._open(now_s)
        preempted = int(self._fleet.counts[state.PREEMPTED]) - before
        return self._measure() | {"preemptions": float(preempted)}

    def _wait(self, request: int, now_s: float) -> None:
        is_replay = bool(self._requests.num_emitted[request])
        self._queue.add(request, Turn("", 1.0), now_s, first=is_replay)

    def _listen(self) -> None:
        """Take note of what replicas have, and of who has begun."""
        fleet, requests, known = self._fleet, self._requests, self._known
        known.tokens_per_step[:] = fleet.tokens_per_step
        known.num_running[:] = known.num_sent[:] = fleet.num_running
        known.num_kv_tokens[:] = fleet.num_kv_tokens
        for number, waiting in enumerate(fleet.first_waiting):
            while waiting != state.NO_REQUEST:
                known.num_sent[number] += 1
                waiting = fleet.next_waiting[waiting]
        for request, (number, num_tokens) in list(self._unbegun.items()):
            times = (
                requests.resumed_s if self._lost[request] else requests.first_token_s
            )
            if not np.isnan(times[request]) or requests.num_finishes[request]:
                self._begin(request, number, num_tokens)

    def _begin(self, request: int, number: int, num_tokens: int) -> None:
        del self._unbegun[request]
        self._known.num_prompt_tokens[number] -= num_tokens
        self._refills.note_begun(request)

    def _open(self, now_s: float) -> None:
        """Lease what may be leased now."""
        free_seats = np.maximum(0, self._seats - self._known.num_sent)
        most = min(int(free_seats[: self._num_alive].sum()), _UNSETTLED)
        num_opened = 0
        while self._queue:
            request = self._queue.peek(now_s)
            emitted = int(self._requests.num_emitted[request])
            num_tokens = int(self._requests.num_prompt_tokens[request]) + emitted
            if not (emitted and self._arm == "at once"):
                if num_opened >= most:
                    return
                if (
                    emitted
                    and self._arm == "paced"
                    and not self._refills.have_room(num_tokens, int(self._free().sum()))
                ):
                    return
                num_opened += 1
            self._queue.pop(now_s)
            if emitted:
                self._refills.note_opened(request, num_tokens)
            self._place(request, num_tokens, now_s)

    def _free(self) -> state.Ints:
        """Return the KV room of each replica that is alive, tokens."""
        held = self._fleet.num_kv_held[: self._num_alive]
        return np.maximum(0, self._room - held)

    def _place(self, request: int, num_tokens: int, now_s: float) -> None:
        """Choose a replica as a front does: where there are a seat and KV room."""
        known, count = self._known, self._num_alive
        there = known.num_sent[:count]
        has_room = (there == 0) | (num_tokens <= self._free())
        known.can_take[:count] = has_room & (there < self._seats)
        known.draws[:] = self._draw(NUM_DRAWS)
        number = choose_ours(self._fleet, num_tokens)
        if number < 0:
            number = int(fewer_of_two(known.num_sent, count, self._draw(NUM_SAMPLED)))
        known.num_sent[number] += 1
        known.num_prompt_tokens[number] += num_tokens
        self._unbegun[request] = number, num_tokens
        self._requests.replica[request] = number
        kernel.enqueue(self._fleet, now_s, number, request)

    def _kill_last(self, now_s: float) -> None:
        """Let a replica die; whatever it had goes to the head of the queue."""
        fleet, lost = self._fleet, []
        self._num_alive -= 1
        fleet.counts[state.OPEN] = number = self._num_alive
        while fleet.num_running[number]:
            lost.append(kernel.vacate(fleet, number, 0))
        while (waiting := int(fleet.first_waiting[number])) != state.NO_REQUEST:
            lost.append(waiting)
            fleet.first_waiting[number] = fleet.next_waiting[waiting]
        for request in sorted(lost):
            self._lost[request] = self._requests.num_emitted[request] > 0
            self._requests.resumed_s[request] = np.nan
            if request in self._unbegun:
                self._begin(request, *self._unbegun[request])
            self._wait(request, now_s)

    def _measure(self) -> dict[str, float]:
        requests, lost = self._requests, self._lost
        arrival_s, finish_s = requests.arrival_s, requests.finish_s
        ttft_ms = 1e3 * (requests.first_token_s - arrival_s)
        after = np.maximum(requests.num_output_tokens - 1, 1)
        tpot_ms = 1e3 * (finish_s - requests.first_token_s) / after
        end_s = _DEATH_S + _STORM_S
        came = (arrival_s >= _DEATH_S) & (arrival_s < end_s)
        there = (arrival_s < end_s) & (finish_s > _DEATH_S) & ~lost
        good = ttft_ms <= TTFT_MS
        bad = [
            t
            for t in np.arange(_DEATH_S, _END_S, _WINDOW_S)
            if good[(arrival_s >= t) & (arrival_s < t + _WINDOW_S)].mean() < _NORMAL
        ]
        found = {
            "ttft_attainment": good[came].mean(),
            "ttft_p99_ms": np.quantile(ttft_ms[came], 0.99),
            "tpot_attainment": (tpot_ms[there] <= TPOT_MS).mean(),
            "tpot_p99_ms": np.quantile(tpot_ms[there], 0.99),
            "normal_s": max(bad) + _WINDOW_S - _DEATH_S if bad else 0.0,
        }
        if lost.any():
            stall_ms = 1e3 * (requests.resumed_s[lost] - _DEATH_S)
            found |= {
                "lost": lost.sum(),
                "stall_p50_ms": np.quantile(stall_ms, 0.5),
                "stall_p99_ms": np.quantile(stall_ms, 0.99),
            }
        return {name: float(value) for name, value in found.items()}


def run_storm() -> list[dict[str, Any]]:
    """Run every arm at every share of KV room that is taken before the death."""
    progress, cells = expect(dict.fromkeys(ARMS, len(_CELLS) * _SEEDS)), []
    for num_replicas, fill in _CELLS:
        engine = load_engine("h100-qwen3-1.7b", 1, 512)
        room = int(_STREAMS * _CONTEXT / fill)
        costs = engine.costs._replace(base_ms=_BASE_MS, max_kv_tokens=room)
        engine = replace(engine, costs=costs)
        for arm in ARMS:
            cell = {"num_replicas": num_replicas, "kv_taken": fill, "arm": arm}
            runs = []
            for seed in range(_SEEDS):
                tick = make_ticker(progress, arm)
                runs.append(Storm(engine, num_replicas, arm, seed).run())
                tick()
            cells.append(cell | {"runs": runs})
    return cells


def render_storm(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return means over seeds as a table."""
    lines = [["replicas", "KV taken", "replays", *_COLUMNS.values()]]
    for cell in cells:
        row = [f"{cell['num_replicas']}", f"{cell['kv_taken']:.0%}", cell["arm"]]
        for name in _COLUMNS:
            values = [run[name] for run in cell["runs"] if name in run]
            scale = 100 if name.endswith("attainment") else 1
            mean = f"{scale * np.mean(values):.4g}" if values else "-"
            is_never = name == "normal_s" and max(values) >= _END_S - _DEATH_S
            row.append("never" if is_never else mean)
        lines.append(row)
    return join_parts(to_table(lines))
