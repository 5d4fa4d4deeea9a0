"""The controller: rounds, loads and arms in turn, until all is measured."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from loadtest.engine.measurement import list_latencies
from loadtest.engine.plan import Block
from loadtest.engine.pool import EngineProcess
from loadtest.engine.run import SideBySide, digest_conditions
from loadtest.engine.workloads import RequestMaker
from loadtest.errors import LoadTestError
from loadtest.experiment import Turn, shuffle
from loadtest.result_folder import ResultFolder

from .plan import ClassArm, Plan, Units, make_crowd, make_single, make_stream

_WARM_UP_AT = (1, 4)
"""Requests in flight while warming up, beside as many as fit."""

Engines = Mapping[ClassArm, EngineProcess]


class Store(ResultFolder):
    """An output folder: first the units, then a record for each group.

    A group is one load in one round on all arms, kept as a whole.
    """

    def units(self) -> Units | None:
        """Return what was measured before all else, if it was."""
        first = next(iter(self.records()), None)
        return None if first is None else Units(**first)


class Bench(SideBySide[ClassArm, float]):
    """Engines to which the same requests come at the same moments."""

    unit = "load "

    def __init__(self, plan: Plan, store: Store, requests: RequestMaker) -> None:
        self._plan, self._store, self.rounds = plan, store, plan.rounds
        in_flight = sorted({*_WARM_UP_AT, plan.engine["max_num_seqs"]})
        self._warm_ups = [requests.make_warm_up(count) for count in in_flight]
        models = {"target": plan.target, "draft": plan.draft}
        conditions = plan.conditions() | digest_conditions("loadtest/slo/*.py")
        super().__init__(store, requests, conditions, models)

    def plan_round(
        self, number: int
    ) -> list[tuple[Sequence[ClassArm], Sequence[float]]]:
        """Return all arms and loads, in any order."""
        return [(self._plan.arms, shuffle(self._plan.loads, f"{number}"))]

    def place(self, number: int, arm: ClassArm, cell: float) -> dict[str, Any]:
        """Return round, load and arm."""
        return {"round": number, "load": cell, "arm": arm.name}

    def name_of(self, cell: float) -> str:
        """Return the load."""
        return f"{cell:g}"

    @contextmanager
    def start(self, turn: Turn[ClassArm, float]) -> Iterator[Engines]:
        """Start engines anew; before the first ones, measure what targets go by."""
        if (known := self._store.units()) is None:
            known = self._measure_units()
            self._store.append_record(asdict(known))
        plan = self._plan = replace(self._plan, units=known)
        with self.start_warm(turn.arms, plan.deployment, self._warm_ups) as engines:
            yield engines

    def measure_cell(
        self, turn: Turn[ClassArm, float], cell: float, up: Engines
    ) -> None:
        """Send the same blocks of requests to every arm, and keep what came of them."""
        found = []
        for block in range(self._plan.blocks):
            key = f"{turn.round} {cell:g} {block}"
            stream, names = make_stream(self._plan, self.requests, cell, key)
            asked = {arm: ("answer", self._tell(arm, stream, names)) for arm in up}
            for arm, result in self.ask_in_turn(turn, cell, block, up, asked):
                place = self.place(turn.round, arm, cell)
                found.append(place | {"block": block, "classes": names} | result)
        for arm in up:
            label = f"round {turn.round} load {cell:g}"
            self.progress.advance(self.name_of(cell), self.spent_s[arm], label)
        self._store.append_record(found)

    def _tell(self, arm: ClassArm, stream: Block, names: list[str]) -> Block:
        """Let requests bring the priority of their class, where the arm knows any."""
        if not arm.told:
            return stream
        kinds = self._plan.kinds
        return replace(stream, priorities=tuple(kinds[name].priority for name in names))

    def _measure_units(self) -> Units:
        none, deploy = ClassArm("none"), self._plan.deployment
        with self.start_warm([none], deploy, self._warm_ups) as engines:
            self.progress.show("measuring what targets and loads go by")
            alone, crowd = (
                engines[none].ask("answer", make(self._plan, self.requests))
                for make in (make_single, make_crowd)
            )
        return read_units(alone, crowd, self._plan.max_other_cpu)


def read_units(
    alone: Mapping[str, Any], crowd: Mapping[str, Any], max_other_cpu: float
) -> Units:
    """Return what targets and loads go by, from two blocks' answers.

    Raises:
        LoadTestError: Others used more of the machine: all results would hang on it.
    """
    share = max(one["other_cpu_share"] for one in (alone, crowd))
    if share > max_other_cpu:
        raise LoadTestError(
            f"other processes used {share:.0%} of this machine while was measured what "
            "targets and loads go by, which is kept for good: run this again without "
            "them"
        )
    tpot_ms = float(list_latencies(alone)["tpot_ms"].median())
    return Units(tpot_ms, len(crowd["due_s"]) / crowd["seconds"], share)
