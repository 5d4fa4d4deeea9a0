"""The controller: rounds, cells and arms in turn, until all is measured."""

from __future__ import annotations

import itertools
import math
import operator
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.arms import Arm
from loadtest.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
    digest_code,
)
from loadtest.interrupts import interruptible
from loadtest.model_files import describe_model
from loadtest.progress import Progress

from .plan import Cell, Plan
from .pool import EngineProcess, start_engines
from .report import write_results
from .store import LOG_FOLDER, Store
from .workloads import RequestMaker

_CODE = (
    *("policies/**/*.py", "serving/engine/**/*.py", "serving/*.py"),
    *("loadtest/engine/*.py", "loadtest/models/tasks/*.py"),
)
_CODE_OF_REPORTS = {
    f"loadtest/engine/{name}.py" for name in ("cli", "plots", "report", "summary")
}

Engines = Mapping[Arm, EngineProcess]


class Bench:
    """One invocation on one output folder."""

    def __init__(self, plan: Plan, store: Store, requests: RequestMaker) -> None:
        """Check that what the folder holds was measured under the same conditions.

        Raises:
            LoadTestError: If it was not.
        """
        self._plan, self._store, self._requests = plan, store, requests
        machine, versions = describe_machine(plan.gpu), describe_versions()
        models = {"target": plan.target, "draft": plan.draft}
        described = {role: describe_model(path) for role, path in models.items()}
        code = digest_code(*_CODE)
        store.check_conditions(
            # One entry each: a refusal to go on names what has changed, nothing else.
            plan.conditions()
            | {"seed": requests.seed, "cpu": machine["cpu"]}
            | {role: one["digest"] for role, one in described.items()}
            | {f"version of {name}": one for name, one in versions.items()}
            | {f"code of {k}": v for k, v in code.items() if k not in _CODE_OF_REPORTS}
        )
        pieces = store.environment().get("pieces", [])
        self._environment = {
            "machine": machine,
            "models": described,
            "versions": versions,
            "pieces": [*pieces, describe_piece()],
        }
        # Engines start anew in every round, and again where a run goes on within one.
        self._piece = len(pieces) + 1

    def measure(self, minutes: float | None = None) -> bool:
        """Measure what is missing; every finished group is kept.

        Args:
            minutes: Begin nothing new after this long; None for no limit.

        Returns:
            Whether everything has been measured.
        """
        done, arms = self._store.done(), self._plan.arms
        rounds = {
            number: [cell for cell in self._plan.cells if (number, cell) not in done]
            for number in range(1, self._plan.rounds + 1)
        }
        missing = Counter(itertools.chain(*rounds.values()))
        if not missing:
            return True
        self._store.write_environment(self._environment)
        deadline_s = time.monotonic() + 60 * (minutes or math.inf)
        progress = Progress(missing.total() * len(arms))
        for cell, count in missing.items():
            progress.expect(cell.name, count * len(arms))
        with interruptible():
            return all(
                self._measure_round(number, cells, deadline_s, progress)
                for number, cells in rounds.items()
                if cells
            )

    def _measure_round(
        self, number: int, cells: Sequence[Cell], deadline_s: float, progress: Progress
    ) -> bool:
        """Measure some cells on engines started anew; return whether there was time.

        On the CPU all arms are side by side. A GPU seldom holds two engines, so there
        each arm goes through all cells before the next one starts.
        """
        if time.monotonic() > deadline_s:
            return False
        turns = [list(self._plan.arms)]
        if self._plan.gpu is not None:
            turns = [[arm] for arm in shuffle(self._plan.arms, f"{number}")]
            deadline_s = math.inf  # Half a round would be of no use.
        found: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
        logs = self._store.folder / LOG_FOLDER
        for arms in turns:
            with start_engines(self._plan, arms, logs, progress.say) as engines:
                for concurrency in sorted({cell.concurrency for cell in cells}):
                    requests = self._requests.make_warm_up(concurrency)
                    for arm, engine in engines.items():
                        progress.show(f"warming up {arm.name}, {concurrency} in flight")
                        engine.run(requests)
                for cell in cells:
                    if time.monotonic() > deadline_s:
                        return False
                    found[cell] += self._measure_cell(engines, cell, number, progress)
                    if arms is turns[-1]:
                        self._store.append_record(self._compare_replies(found[cell]))
                        write_results(self._store)
        return True

    def _measure_cell(
        self, engines: Engines, cell: Cell, number: int, progress: Progress
    ) -> list[dict[str, Any]]:
        """Measure one cell in one round, block by block, until all had their time.

        Every arm answers the same requests, a few seconds of them at a time: what the
        machine does from one moment to the next meets all arms alike. The first block
        is kept step by step.
        """
        found: list[dict[str, Any]] = []
        measured_s, spent_s = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0.0)
        label = f"round {number} {cell.name}"
        for block in itertools.count():
            requests = self._requests.make(cell, number, block)
            for arm in shuffle(list(engines), f"{number} {cell.name} {block}"):
                progress.show(f"{label} {arm.name}, block {block + 1}")
                is_first = (number, block) == (1, 0)
                trace = self._store.trace_file(cell, arm) if is_first else None
                began_s = time.monotonic()
                result = engines[arm].run(requests, trace)
                spent_s[arm] += time.monotonic() - began_s
                measured_s[arm] += result["window_s"]
                place = {"policy": arm.name, "round": number, "block": block}
                place |= {"engine_start": f"{number}.{self._piece}"}
                found.append(place | cell.as_dict() | result)
            if min(measured_s.values()) >= self._plan.window_s:
                break
        for arm in engines:
            tokens = sum(o["num_tokens"] for o in found if o["policy"] == arm.name)
            told = f"{label} {arm.name}: {tokens / measured_s[arm]:.0f} tokens/s"
            progress.advance(cell.name, spent_s[arm], told)
        return found

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


def shuffle(arms: Sequence[Arm], key: str) -> list[Arm]:
    """Return the arms in an order that the key decides.

    With other keys every arm comes first and last, and after every other one: what one
    leaves behind, and what drifts, falls on all of them alike.
    """
    return random.Random(key).sample(arms, len(arms))
