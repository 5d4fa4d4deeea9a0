"""The controller: rounds, loads and arms in turn, until all is measured."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.engine.open_loop import Stream
from loadtest.engine.pool import EngineProcess, start_engines
from loadtest.engine.run import shuffle
from loadtest.engine.workloads import RequestMaker
from loadtest.experiment import Experiment, Turn, describe_origin
from loadtest.result_folder import ResultFolder

from .plan import ClassArm, Plan, Units, make_crowd, make_single, make_stream

_WARM_UP_AT = (1, 4)
"""Requests in flight while warming up, beside as many as fit."""

Engines = Mapping[ClassArm, EngineProcess]


class Store(ResultFolder):
    """An output folder: first the units, then a record for each group.

    A group is one load in one round on all arms, kept as a whole.
    """

    records_file = "measurements.jsonl"
    output_files = ("results.json", "runs.csv", "results.md", "results.png")
    folders = ("traces", "logs")
    error = LoadTestError

    def units(self) -> Units | None:
        """Return what was measured before all else, if it was."""
        first = next(iter(self.records()), None)
        return None if first is None else Units(**first)

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return all groups."""
        return self.records()[1:]


class Bench(Experiment[ClassArm, float, Engines]):
    """Engines side by side, to which the same requests come at the same moments."""

    def __init__(self, plan: Plan, store: Store, requests: RequestMaker) -> None:
        """Check that what the folder holds was measured under the same conditions."""
        self._plan, self._store, self._requests = plan, store, requests
        environment, conditions = describe_origin(
            {"target": plan.target, "draft": plan.draft}
        )
        store.check_conditions(plan.conditions() | {"seed": requests.seed} | conditions)
        super().__init__(store, environment)

    def find_turns(self) -> list[Turn[ClassArm, float]]:
        """Return rounds, each with what is missing of its loads, in any order."""
        done = {(group[0]["round"], group[0]["load"]) for group in self._store.groups()}
        turns = []
        for number in range(1, self._plan.rounds + 1):
            loads = [load for load in self._plan.loads if (number, load) not in done]
            if loads:
                mixed = shuffle(loads, f"{number}")
                turns.append(Turn(number, self._plan.arms, mixed))
        return turns

    def name_of(self, cell: float) -> str:
        """Return the load."""
        return f"{cell:g}"

    @contextmanager
    def start(self, turn: Turn[ClassArm, float]) -> Iterator[Engines]:
        """Start engines anew; before the first ones, measure what targets go by."""
        if (known := self._store.units()) is None:
            known = self._measure_units()
            self._store.append_record(asdict(known))
        self._plan = replace(self._plan, units=known)
        with self._start(turn.arms) as engines:
            yield engines

    def measure_cell(
        self, turn: Turn[ClassArm, float], cell: float, up: Engines
    ) -> None:
        """Send the same blocks of requests to every arm, and keep what came of them."""
        found, spent_s = [], dict.fromkeys(up, 0.0)
        label = f"round {turn.round} load {cell:g}"
        for block in range(self._plan.blocks):
            key = f"{turn.round} {cell:g} {block}"
            stream, names = make_stream(self._plan, self._requests, cell, key)
            for arm in shuffle(list(up), key):
                self.progress.show(f"{label} {arm.name}, block {block + 1}")
                trace = self._store.folder / f"traces/{cell:g}/{arm.file_name}.npz"
                is_first = (turn.round, block) == (1, 0)
                began_s = time.monotonic()
                result = up[arm].answer_stream(
                    self._tell(arm, stream, names), trace if is_first else None
                )
                spent_s[arm] += time.monotonic() - began_s
                place = {"round": turn.round, "load": cell, "block": block}
                found.append(place | {"arm": arm.name, "classes": names} | result)
        for arm in up:
            self.progress.advance(self.name_of(cell), spent_s[arm], label)
        self._store.append_record(found)

    def _tell(self, arm: ClassArm, stream: Stream, names: list[str]) -> Stream:
        """Let requests bring the priority of their class, where the arm knows any."""
        if not arm.told:
            return stream
        kinds = self._plan.kinds
        return replace(stream, priorities=tuple(kinds[name].priority for name in names))

    def _measure_units(self) -> Units:
        with self._start([ClassArm("none")]) as engines:
            (engine,) = engines.values()
            self.progress.show("measuring what targets and loads go by")
            alone = [
                engine.answer_stream(stream)
                for stream in make_single(self._plan, self._requests)
            ]
            crowd = engine.answer_stream(make_crowd(self._plan, self._requests))
        times_ms = [
            1e3 * (one["last_s"][0] - one["first_s"][0]) / (one["num_tokens"][0] - 1)
            for one in alone
            if one["num_tokens"][0] > 1
        ]
        return Units(median(times_ms), len(crowd["due_s"]) / crowd["seconds"])

    @contextmanager
    def _start(self, arms: Sequence[ClassArm]) -> Iterator[Engines]:
        logs, say = self._store.folder / "logs", self.progress.say
        with start_engines(self._plan, arms, logs, say) as engines:
            for concurrency in sorted(
                {*_WARM_UP_AT, self._plan.engine["max_num_seqs"]}
            ):
                requests = self._requests.make_warm_up(concurrency)
                for arm, engine in engines.items():
                    self.progress.show(
                        f"warming up {arm.name}, {concurrency} in flight"
                    )
                    engine.run(requests)
            yield engines
