"""The controller: rounds, cells and arms in turn, until all is measured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from loadtest.arms import Arm
from loadtest.client.errors import LoadTestError
from loadtest.environment import (
    describe_machine,
    describe_piece,
    describe_versions,
    digest_code,
)
from loadtest.interrupts import interruptible
from loadtest.model_files import count_parameters, describe_model
from loadtest.progress import Progress

from .models import DTYPE_BYTES
from .plan import Cell, Plan, shuffle
from .pool import Pool
from .report import write_results
from .store import LOG_FOLDER, Store
from .workloads import NEIGHBOUR, RequestMaker, Requests

WARM_UP_TOKENS = 72
"""Reply length while warming up: enough for the numbers of tokens that steps carry to
occur, for each of which oneDNN compiles its products once."""

ENGINE_BYTES = 800 << 20
"""Memory of a vLLM process before weights and KV cache."""

WORTH_MENTIONING_SHARE = 0.1
"""Of the machine, taken by others: from here on speeds are not to be trusted."""

_CODE = (
    *("policies/**/*.py", "serving/engine/**/*.py", "serving/*.py"),
    *("loadtest/engine/*.py", "loadtest/models/tasks/*.py"),
)
_CODE_OF_REPORTS = {
    f"loadtest/engine/{name}.py" for name in ("cli", "plots", "report", "summary")
}


class Bench:
    """One invocation on one output folder."""

    def __init__(self, plan: Plan, store: Store, requests: RequestMaker) -> None:
        """Check that what the folder holds was measured under the same conditions.

        Raises:
            LoadTestError: If it was not.
        """
        self._plan = plan
        self._store = store
        self._requests = requests
        machine, versions = describe_machine(plan.gpu), describe_versions()
        models = {"target": plan.target, "draft": plan.draft}
        described = {role: describe_model(path) for role, path in models.items()}
        code = digest_code(*_CODE)
        store.check_conditions(
            # One entry each: a refusal to go on names what has changed, nothing else.
            plan.conditions()
            | {"seed": requests.seed, "min_requests": requests.min_requests}
            | {role: one["digest"] for role, one in described.items()}
            | {"cpu": machine["cpu"]}
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
        done = self._store.done()
        rounds = {
            number: [cell for cell in self._plan.cells if (number, cell) not in done]
            for number in range(1, self._plan.rounds + 1)
        }
        missing = [cell for cells in rounds.values() for cell in cells]
        if not missing:
            return True
        if self._plan.gpu is None:
            _check_memory(self._plan)
        self._store.write_environment(self._environment)
        deadline_s = time.monotonic() + 60 * minutes if minutes else float("inf")
        progress = Progress(len(missing) * len(self._plan.arms))
        for cell in missing:
            progress.expect(cell.name, len(self._plan.arms))
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
        arms = self._plan.arms
        turns = [list(arms)]
        if self._plan.gpu is not None:
            turns = [[arm] for arm in shuffle(arms, f"{number}")]
            deadline_s = float("inf")  # Half a round would be of no use.
        found: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
        for own in turns:
            with Pool(self._plan, self._store.folder / LOG_FOLDER) as pool:
                self._start(pool, own, cells, progress)
                for cell in cells:
                    if time.monotonic() > deadline_s:
                        return False
                    found[cell] += self._measure_cell(pool, own, cell, number, progress)
                    if len({one["policy"] for one in found[cell]}) == len(arms):
                        self._store.append_group(note_differing(found[cell], arms))
                        write_results(self._store)
        return True

    def _start(
        self,
        pool: Pool,
        arms: Sequence[Arm],
        cells: Sequence[Cell],
        progress: Progress,
    ) -> None:
        progress.say(f"starting {len(arms)} engines")
        pool.start(
            arms,
            self._requests.eos_token_id,
            lambda arm: progress.say(f"  {arm.name} is ready"),
        )
        for concurrency in sorted({cell.concurrency for cell in cells}):
            requests = self._requests.make_warm_up(concurrency)
            message = _message(Cell("mixed", 0.0, concurrency), requests)
            for arm in arms:
                progress.show(f"warming up {arm.name} with {concurrency} requests")
                pool.run(arm, message | {"max_tokens": WARM_UP_TOKENS})

    def _measure_cell(
        self,
        pool: Pool,
        arms: Sequence[Arm],
        cell: Cell,
        number: int,
        progress: Progress,
    ) -> list[dict[str, Any]]:
        """Measure one cell in one round, block by block, until all had their time.

        Every arm answers the same requests, a few seconds of them at a time: what the
        machine does from one moment to the next meets all arms alike.
        """
        found: list[dict[str, Any]] = []
        measured_s = dict.fromkeys(arms, 0.0)
        spent_s = dict.fromkeys(arms, 0.0)
        for block in itertools.count():
            requests = self._requests.make(cell, number, block)
            message = _message(cell, requests)
            for arm in shuffle(arms, f"{number} {cell.name} {block}"):
                label = f"round {number} {cell.name} {arm.name}"
                progress.show(f"{label}, block {block + 1}")
                own = message
                if self._plan.trace and (number, block) == (1, 0):
                    path = self._store.trace_file(cell, arm).absolute()
                    own = message | {"trace": str(path)}
                began_s = time.monotonic()
                result = pool.run(arm, own, neighbour=cell.workload == NEIGHBOUR)
                spent_s[arm] += time.monotonic() - began_s
                measured_s[arm] += result["window_s"]
                place = {
                    "policy": arm.name,
                    "round": number,
                    "block": block,
                    "engine_start": f"{number}.{self._piece}",
                }
                found.append(place | cell.as_dict() | result)
            if min(measured_s.values()) >= self._plan.window_s:
                break
        for arm in arms:
            progress.advance(
                cell.name,
                spent_s[arm],
                f"round {number} {cell.name} {arm.name}"
                f"{_note_others([one for one in found if one['policy'] == arm.name])}",
            )
        return found


def note_differing(
    measurements: Sequence[Mapping[str, Any]], arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Put, for digests, the number of requests whose output is not the first arm's.

    In the order of the tables, not in that of the turns.

    At temperature 0 all arms must agree, but for near-ties of the target's two largest
    logits, which bf16 rounds differently for batches of different shapes. Of a block
    that the first arm did not need, nothing is known.
    """
    names = [arm.name for arm in arms]
    reference = {
        one["block"]: one["digests"]
        for one in measurements
        if one["policy"] == names[0]
    }
    return [
        {name: value for name, value in one.items() if name != "digests"}
        | {
            "num_differing_requests": sum(
                ours != theirs
                for ours, theirs in zip(
                    one["digests"],
                    reference.get(one["block"], one["digests"]),
                    strict=True,
                )
            )
        }
        for one in sorted(
            measurements, key=lambda one: (one["block"], names.index(one["policy"]))
        )
    ]


def _message(cell: Cell, requests: Requests) -> dict[str, Any]:
    return {
        "prompts": requests.prompts,
        "concurrency": cell.concurrency,
        "temperature": cell.temperature,
        "switch_at": requests.switch_at,
    }


def _note_others(own: Sequence[Mapping[str, Any]]) -> str:
    speed = sum(one["num_tokens"] for one in own) / sum(one["window_s"] for one in own)
    share = max(one["other_cpu_share"] for one in own)
    if own[0]["workload"] == NEIGHBOUR or share < WORTH_MENTIONING_SHARE:
        return f": {speed:.0f} tokens/s"
    return f": {speed:.0f} tokens/s (others took {share:.0%} of the machine)"


def _check_memory(plan: Plan) -> None:
    """Refuse to start more engines than there is memory for.

    Raises:
        LoadTestError: If there is too little; the kernel would end some process, not
            necessarily one of ours.
    """
    # Not the size of the files: float32 takes twice what bfloat16 takes there.
    weights = DTYPE_BYTES[plan.engine["dtype"]] * (
        count_parameters(plan.target) + count_parameters(plan.draft)
    )
    each = ENGINE_BYTES + weights + plan.engine["kv_cache_memory_bytes"]
    available = psutil.virtual_memory().available
    if each * len(plan.arms) > available:
        raise LoadTestError(
            f"{len(plan.arms)} engines take about {each * len(plan.arms) / 2**30:.1f} "
            f"GiB and {available / 2**30:.1f} GiB are free: name at most "
            f"{available // each} with --policies, or lower --target-parameters or "
            "--concurrency"
        )
