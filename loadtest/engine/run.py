"""The controller: rounds, cells and arms in turn, until all is measured."""

import itertools
import operator
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from loadtest.arms import Arm
from loadtest.client.errors import LoadTestError
from loadtest.environment import digest_code
from loadtest.experiment import Experiment, Turn, describe_origin
from loadtest.result_folder import ResultFolder

from .plan import Cell, Plan
from .pool import EngineProcess, start_engines
from .report import write_results
from .workloads import RequestMaker

_CODE = (
    *("policies/**/*.py", "serving/engine/**/*.py", "serving/*.py"),
    *("loadtest/engine/*.py", "loadtest/experiment.py", "loadtest/models/tasks/*.*"),
)
_CODE_OF_REPORTS = {
    f"loadtest/engine/{name}.py" for name in ("cli", "report", "summary")
}

T = TypeVar("T")
Engines = Mapping[Arm, EngineProcess]


class Store(ResultFolder):
    """An output folder, with a record for each group.

    A group is one cell in one round, measured on all arms. It is kept as a whole: one
    that was interrupted is measured again, because arms are only comparable when they
    were measured side by side.
    """

    records_file = "measurements.jsonl"
    output_files = ("results.json", "results.md", "results.png")
    folders = ("traces", "logs")
    error = LoadTestError

    def done(self) -> set[tuple[int, Cell]]:
        """Return the round and cell of all groups."""
        firsts = (group[0] for group in self.records())
        return {
            (o["round"], Cell(o["workload"], o["temperature"], o["concurrency"]))
            for o in firsts
        }


class Bench(Experiment[Arm, Cell, Engines]):
    """Engines side by side, that answer the same requests in turn.

    A GPU seldom holds two engines, so there each arm goes through all cells of a round
    before the next one starts.
    """

    def __init__(self, plan: Plan, store: Store, requests: RequestMaker) -> None:
        """Check that what the folder holds was measured under the same conditions."""
        self._plan, self._store, self._requests = plan, store, requests
        self._found: dict[tuple[int, Cell], list[dict[str, Any]]] = defaultdict(list)
        models = {"target": plan.target, "draft": plan.draft}
        environment, conditions = describe_origin(models, plan.gpu)
        code = digest_code(*_CODE).items()
        store.check_conditions(
            plan.conditions()
            | {"seed": requests.seed}
            | conditions
            | {f"code of {k}": v for k, v in code if k not in _CODE_OF_REPORTS}
        )
        super().__init__(store, environment)

    def find_turns(self) -> list[Turn[Arm, Cell]]:
        """Return rounds, on a GPU arm by arm."""
        done, arms, turns = self._store.done(), self._plan.arms, []
        for number in range(1, self._plan.rounds + 1):
            cells = [cell for cell in self._plan.cells if (number, cell) not in done]
            together = [list(arms)]
            if self._plan.gpu is not None:
                together = [[arm] for arm in shuffle(arms, f"{number}")]
            turns += [Turn(number, own, cells) for own in together if cells]
        return turns

    def may_stop(self, turn: Turn[Arm, Cell]) -> bool:
        """Tell whether a round is not begun, or its cells are measured one by one."""
        has_begun = (turn.round, turn.cells[0]) in self._found
        return self._plan.gpu is None or not has_begun

    def name_of(self, cell: Cell) -> str:
        """Return the name."""
        return cell.name

    @contextmanager
    def start(self, turn: Turn[Arm, Cell]) -> Iterator[Engines]:
        """Start engines anew."""
        logs, say = self._store.folder / "logs", self.progress.say
        with start_engines(self._plan, turn.arms, logs, say) as engines:
            for concurrency in sorted({cell.concurrency for cell in turn.cells}):
                requests = self._requests.make_warm_up(concurrency)
                for arm, engine in engines.items():
                    label = f"warming up {arm.name}, {concurrency} in flight"
                    self.progress.show(label)
                    engine.run(requests)
            yield engines

    def measure_cell(self, turn: Turn[Arm, Cell], cell: Cell, up: Engines) -> None:
        """Measure a cell block by block, until all had their time.

        Every arm answers the same requests, a few seconds of them at a time: what the
        machine does from one moment to the next meets all arms alike. The first block
        is kept step by step.
        """
        number, found = turn.round, self._found[turn.round, cell]
        measured_s, spent_s = dict.fromkeys(up, 0.0), dict.fromkeys(up, 0.0)
        label = f"round {number} {cell.name}"
        for block in itertools.count():
            requests = self._requests.make(cell, number, block)
            for arm in shuffle(list(up), f"{number} {cell.name} {block}"):
                self.progress.show(f"{label} {arm.name}, block {block + 1}")
                trace = self._store.folder / f"traces/{cell.name}/{arm.file_name}.npz"
                is_first = (number, block) == (1, 0)
                began_s = time.monotonic()
                result = up[arm].run(requests, trace if is_first else None)
                spent_s[arm] += time.monotonic() - began_s
                measured_s[arm] += result["window_s"]
                place = {"policy": arm.name, "round": number, "block": block}
                # Engines start anew in every round, and where a run goes on within one.
                place |= {"engine_start": f"{number}.{self.piece}"}
                found.append(place | asdict(cell) | result)
            if min(measured_s.values()) >= self._plan.window_s:
                break
        for arm in up:
            tokens = sum(o["num_tokens"] for o in found if o["policy"] == arm.name)
            told = f"{label} {arm.name}: {tokens / measured_s[arm]:.0f} tokens/s"
            self.progress.advance(cell.name, spent_s[arm], told)
        if {one["policy"] for one in found} == {arm.name for arm in self._plan.arms}:
            self._store.append_record(self._compare_replies(found))
            write_results(self._store)

    def _compare_replies(self, group: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Put, for digests, the number of replies that are not the first arm's.

        At temperature 0 all arms must agree, but for near-ties of the target's two
        largest logits, which bf16 rounds differently for batches of different shapes.
        Of a block that the first arm did not need, nothing is known.
        """
        names = [arm.name for arm in self._plan.arms]
        # In the order of the tables, not in that of the turns.
        group = sorted(group, key=lambda one: names.index(one["policy"]))
        first = {o["block"]: o["digests"] for o in group if o["policy"] == names[0]}
        for one in group:
            own = one.pop("digests")
            theirs = first.get(one["block"], own)
            one["num_differing_requests"] = sum(map(operator.ne, own, theirs))
        return group


def shuffle(arms: Sequence[T], key: str) -> list[T]:
    """Return the arms in an order of the key's, so that what drifts falls on all alike.

    With other keys every arm comes first and last, and after every other one.
    """
    return random.Random(key).sample(arms, len(arms))
