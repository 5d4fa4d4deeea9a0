"""The controller: rounds, cells and arms in turn, until all is measured."""

import itertools
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from loadtest.arms import Arm
from loadtest.environment import digest_code
from loadtest.experiment import Experiment, Turn, shuffle
from loadtest.result_folder import ResultFolder

from .plan import Block, Cell, Plan
from .pool import EngineProcess, start_engines
from .report import write_results
from .workloads import RequestMaker

_CODE = (
    *("policies/**/*.py", "serving/engine/**/*.py", "serving/*.py"),
    *("loadtest/engine/*.py", "loadtest/experiment.py", "loadtest/models/tasks/*.*"),
)
_CODE_OF_REPORTS = {
    f"loadtest/{bench}/{name}.py"
    for bench in ("engine", "paper", "slo")
    for name in ("cli", "report", "summary")
}


def digest_conditions(*more: str) -> dict[str, str]:
    """Return digests of the code that results depend on, as conditions of them."""
    code = digest_code(*_CODE, *more).items()
    return {f"code of {k}": v for k, v in code if k not in _CODE_OF_REPORTS}


A = TypeVar("A", bound=Arm)
C = TypeVar("C")
Engines = Mapping[Arm, EngineProcess]


class SideBySide(Experiment[A, C, Mapping[A, EngineProcess]], Generic[A, C]):
    """Engines that answer the same requests in turn.

    What the machine does from one moment to the next meets all arms alike.

    Attributes:
        unit: What stands before a cell's name in messages.
        spent_s: What each arm has spent in the cell that is measured.
    """

    unit = ""

    def __init__(
        self,
        folder: ResultFolder,
        requests: RequestMaker,
        conditions: Mapping[str, Any],
        models: Mapping[str, Path],
        gpu: str | None = None,
    ) -> None:
        self.requests, self.spent_s = requests, dict[A, float]()
        super().__init__(folder, {**conditions, "seed": requests.seed}, models, gpu)

    @contextmanager
    def start_warm(
        self,
        arms: Sequence[A],
        deploy: Callable[[A], Mapping[str, Any]],
        warm_ups: Iterable[Block],
    ) -> Iterator[Mapping[A, EngineProcess]]:
        """Start engines anew, and warm them up with these requests."""
        logs, say = self.folder.folder / "logs", self.progress.say
        with start_engines(arms, deploy, logs, say) as engines:
            for block in warm_ups:
                for arm, engine in engines.items():
                    label = f"warming up {arm.name}, {block.concurrency} in flight"
                    self.progress.show(label)
                    engine.ask("answer", block)
            yield engines

    def ask_in_turn(
        self,
        turn: Turn[A, C],
        cell: C,
        block: int,
        up: Mapping[A, EngineProcess],
        messages: Mapping[A, tuple[str, Any]],
    ) -> Iterator[tuple[A, dict[str, Any]]]:
        """Ask every arm for a block's answers, and yield them as they come.

        The order is another one in every block. The first block of all is kept step by
        step.
        """
        name = self.name_of(cell)
        if not block:
            self.spent_s = dict.fromkeys(up, 0.0)
        for arm in shuffle(list(up), f"{turn.round} {name} {block}"):
            place = f"round {turn.round} {self.unit}{name}"
            self.progress.show(f"{place} {arm.name}, block {block + 1}")
            trace = self.folder.folder / f"traces/{name}/{arm.file_name}.npz"
            is_first = (turn.round, block) == (1, 0)
            began_s = time.monotonic()
            found = up[arm].ask(*messages[arm], trace if is_first else None)
            self.spent_s[arm] += time.monotonic() - began_s
            yield arm, found


class Bench(SideBySide[Arm, Cell]):
    """Rounds of all cells, with a record for each group.

    A group is one cell in one round, measured on all arms. It is kept as a whole: one
    that was interrupted is measured again, because arms are only comparable when they
    were measured side by side.

    A GPU seldom holds two engines, so there each arm goes through all cells of a round
    before the next one starts.
    """

    def __init__(self, plan: Plan, store: ResultFolder, requests: RequestMaker) -> None:
        self._plan, self.rounds = plan, plan.rounds
        self._found: dict[tuple[int, Cell], list[dict[str, Any]]] = defaultdict(list)
        conditions = plan.conditions() | digest_conditions()
        models = {"target": plan.target, "draft": plan.draft}
        super().__init__(store, requests, conditions, models, plan.gpu)

    def plan_round(self, number: int) -> list[tuple[Sequence[Arm], Sequence[Cell]]]:
        """Return all arms, on a GPU one by one."""
        arms, cells = self._plan.arms, self._plan.cells
        if self._plan.gpu is None:
            return [(arms, cells)]
        return [([arm], cells) for arm in shuffle(arms, f"{number}")]

    def place(self, number: int, arm: Arm, cell: Cell) -> dict[str, Any]:
        """Return policy, round and cell."""
        return {"policy": arm.name, "round": number, **asdict(cell)}

    def may_stop(self, turn: Turn[Arm, Cell]) -> bool:
        """Tell whether a round is not begun, or its cells are measured one by one."""
        has_begun = (turn.round, turn.cells[0]) in self._found
        return self._plan.gpu is None or not has_begun

    def name_of(self, cell: Cell) -> str:
        """Return the name."""
        return cell.name

    def start(self, turn: Turn[Arm, Cell]) -> AbstractContextManager[Engines]:
        """Start engines anew."""
        in_flight = sorted({cell.concurrency for cell in turn.cells})
        warm_ups = map(self.requests.make_warm_up, in_flight)
        return self.start_warm(turn.arms, self._plan.deployment, warm_ups)

    def measure_cell(self, turn: Turn[Arm, Cell], cell: Cell, up: Engines) -> None:
        """Measure a cell block by block, in seconds each, until all had their time."""
        number, found = turn.round, self._found[turn.round, cell]
        measured_s = dict.fromkeys(up, 0.0)
        for block in itertools.count():
            asked = "run", self.requests.make(cell, number, block)
            messages = dict.fromkeys(up, asked)
            for arm, result in self.ask_in_turn(turn, cell, block, up, messages):
                measured_s[arm] += result["window_s"]
                place = self.place(number, arm, cell) | {"block": block}
                # Engines start anew in every round, and where a run goes on within one.
                place |= {"engine_start": f"{number}.{self.piece}"}
                found.append(place | result)
            if min(measured_s.values()) >= self._plan.window_s:
                break
        for arm in up:
            tokens = sum(o["num_tokens"] for o in found if o["policy"] == arm.name)
            told = f"{tokens / measured_s[arm]:.0f} tokens/s"
            label = f"round {number} {cell.name} {arm.name}: {told}"
            self.progress.advance(cell.name, self.spent_s[arm], label)
        if {one["policy"] for one in found} == {arm.name for arm in self._plan.arms}:
            self.folder.append_record(self._compare_replies(found))
            write_results(self.folder)

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
