"""The controller: rounds, cells and arms in turn, until all is measured."""

from __future__ import annotations

import time
from typing import Any

import psutil

from loadtest.interrupts import interruptible

from .arms import Arm
from .environment import (
    describe_conditions,
    describe_machine,
    describe_models,
    describe_piece,
    describe_versions,
)
from .errors import BenchError
from .plan import Cell, rotate
from .pool import Pool
from .progress import Progress
from .report import write_results
from .rows import find_differing
from .settings import BenchSettings
from .store import LOG_FOLDER, Store
from .workloads import RequestMaker, Requests

WARM_UP_TOKENS = 24
"""Reply length while warming up: enough for every batch size to occur."""

ENGINE_BYTES = 800 << 20
"""Memory of a vLLM process before weights and KV cache."""

WORTH_MENTIONING_SHARE = 0.1
"""Of the machine, taken by others: from here on speeds are not to be trusted."""

_TRACED_ROUND = 0
"""Requests of the traced round; measured rounds count from 1."""


class Bench:
    """One invocation on one output folder."""

    def __init__(
        self,
        settings: BenchSettings,
        store: Store,
        requests: RequestMaker,
    ) -> None:
        """Check that what the folder holds was measured under the same conditions.

        Raises:
            BenchError: If it was not.
        """
        self._settings = settings
        self._store = store
        self._requests = requests
        models = describe_models(settings)
        store.check_conditions(describe_conditions(settings, models))
        pieces = store.environment().get("pieces", [])
        self._environment = {
            "machine": describe_machine(),
            "models": models,
            "versions": describe_versions(),
            "pieces": [*pieces, describe_piece()],
        }

    def measure(self, minutes: float | None = None) -> bool:
        """Measure what is missing; every finished group is kept.

        Args:
            minutes: Begin nothing new after this long; None for no limit.

        Returns:
            Whether everything has been measured.
        """
        groups, traces = self._missing_groups(), self._missing_traces()
        if not groups and not traces:
            return True
        _check_memory(self._settings)
        self._store.write_environment(self._environment)
        deadline_s = time.monotonic() + 60 * minutes if minutes else float("inf")
        arms = self._settings.arms
        progress = Progress(len(groups) * len(arms) + len(traces))
        for _, cell in groups:
            progress.expect(cell.name, len(arms))
        for cell, _ in traces:
            progress.expect(cell.name, 1)
        logs = self._store.folder / LOG_FOLDER
        with interruptible(), Pool(logs, self._settings.cpus) as pool:
            self._start(pool, progress)
            for number, cell in groups:
                if time.monotonic() > deadline_s:
                    return False
                self._store.append_group(
                    self._measure_group(pool, number, cell, progress)
                )
                write_results(self._store)
            for cell, arm in traces:
                if time.monotonic() > deadline_s:
                    return False
                self._trace(pool, cell, arm, progress)
        return True

    def _missing_groups(self) -> list[tuple[int, Cell]]:
        done = self._store.done()
        return [
            (number, cell)
            for number in range(1, self._settings.rounds + 1)
            for cell in self._settings.cells
            if (number, cell) not in done
        ]

    def _missing_traces(self) -> list[tuple[Cell, Arm]]:
        if not self._settings.trace:
            return []
        return [
            (cell, arm)
            for cell in self._settings.cells
            for arm in self._settings.arms
            if arm.speculates
            and not self._store.trace_file(cell, arm.file_name).exists()
        ]

    def _start(self, pool: Pool, progress: Progress) -> None:
        arms = self._settings.arms
        progress.say(f"starting {len(arms)} engines")
        started: list[str] = []

        def on_ready(arm: Arm) -> None:
            started.append(arm.name)
            progress.say(f"  {len(started)}/{len(arms)} {arm.name}")

        pool.start(self._settings, self._requests.eos_token_id, on_ready)
        if any(cell.workload == "drift-neighbour" for cell in self._settings.cells):
            pool.start_neighbour()
        progress.say("warming up")
        for arm in arms:
            for concurrency in sorted({c.concurrency for c in self._settings.cells}):
                self._warm_up(pool, arm, concurrency)

    def _warm_up(self, pool: Pool, arm: Arm, concurrency: int) -> None:
        requests = self._requests.make_warm_up(concurrency)
        cell = Cell("mixed", 0.0, concurrency)
        message = _message(cell, requests) | {"max_tokens": WARM_UP_TOKENS}
        pool.run(arm, message, neighbour=False)

    def _measure_group(
        self, pool: Pool, number: int, cell: Cell, progress: Progress
    ) -> list[dict[str, Any]]:
        """Measure one cell in one round on all arms."""
        requests = self._requests.make(cell, number)
        message = _message(cell, requests)
        turn = number + self._settings.cells.index(cell)
        by_arm: dict[Arm, dict[str, Any]] = {}
        for arm in rotate(self._settings.arms, turn):
            began_s = time.monotonic()
            result = pool.run(arm, message, neighbour=requests.neighbour)
            by_arm[arm] = {"policy": arm.name, "round": number} | cell.as_dict()
            by_arm[arm] |= result
            progress.advance(
                cell.name,
                time.monotonic() - began_s,
                f"round {number} {cell.name} {arm.name}: "
                f"{result['output_tokens_per_s']:.0f} tokens/s"
                f"{_note_others(result['other_cpu_share'], requests)}",
            )
        measurements = [by_arm[arm] for arm in self._settings.arms]
        differing = find_differing(measurements)
        for measurement in measurements:
            measurement["num_differing_requests"] = differing[measurement["policy"]]
            del measurement["digests"]
        return measurements

    def _trace(self, pool: Pool, cell: Cell, arm: Arm, progress: Progress) -> None:
        requests = self._requests.make(cell, _TRACED_ROUND)
        path = self._store.trace_file(cell, arm.file_name)
        began_s = time.monotonic()
        pool.run(
            arm,
            _message(cell, requests) | {"trace": str(path.absolute())},
            neighbour=requests.neighbour,
        )
        if not path.exists():
            raise BenchError(
                f"{arm.name}: its scheduler has no planner to trace; "
                "run with --no-trace"
            )
        progress.advance(
            cell.name, time.monotonic() - began_s, f"traced {cell.name} {arm.name}"
        )


def _message(cell: Cell, requests: Requests) -> dict[str, Any]:
    return {
        "prompts": requests.prompts,
        "concurrency": cell.concurrency,
        "temperature": cell.temperature,
        "switch_at": requests.switch_at,
    }


def _note_others(cpu_share: float, requests: Requests) -> str:
    if requests.neighbour or cpu_share < WORTH_MENTIONING_SHARE:
        return ""
    return f" (other processes took {cpu_share:.0%} of the machine)"


def _check_memory(settings: BenchSettings) -> None:
    """Refuse to start more engines than there is memory for.

    Raises:
        BenchError: If there is too little; the kernel would end some process, not
            necessarily one of ours.
    """
    engine = settings.engine
    weights = sum(
        file.stat().st_size
        for model in (engine.target, engine.draft)
        for file in model.glob("*.safetensors")
    )
    each = ENGINE_BYTES + weights + engine.kv_cache_memory_bytes
    available = psutil.virtual_memory().available
    num_arms = len(settings.arms)
    if num_arms * each > available:
        raise BenchError(
            f"{num_arms} engines take about {num_arms * each / 2**30:.1f} GiB and "
            f"{available / 2**30:.1f} GiB are free: name at most "
            f"{available // each} with --policies, or lower --target-parameters or "
            "--concurrency"
        )
