"""The controller: rounds, cells and arms in turn, until all is measured."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from .models import DTYPE_BYTES, count_parameters
from .plan import Cell, is_planning, shuffle
from .pool import Finished, Pool
from .progress import Progress
from .report import write_results
from .rows import find_differing
from .settings import BenchSettings
from .store import LOG_FOLDER, Store
from .workloads import RequestMaker, Requests, is_drifting
from .yardstick import Yardstick

WARM_UP_TOKENS = 72
"""Reply length while warming up: enough for the numbers of tokens that steps carry to
occur, for each of which oneDNN compiles its products once."""

ENGINE_BYTES = 800 << 20
"""Memory of a vLLM process before weights and KV cache."""

WORTH_MENTIONING_SHARE = 0.1
"""Of the machine, taken by others: from here on speeds are not to be trusted."""

TURNS = 6
"""Turns an arm takes in a measurement, about a second each: a machine's speed may move
by a tenth within seconds, and only what meets all arms alike cancels. Shorter ones
would show what it costs to wake an engine up."""

_TRACED_ROUND = 0
"""Requests of the traced round; measured rounds count from 1."""

_Group = tuple[int, Cell]
"""A round's number and a cell, measured on all arms."""

_Untraced = tuple[Cell, list[Arm]]
"""A cell and the arms that are still to be traced in it."""


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
            "machine": describe_machine(settings.gpu),
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
        num_traces = sum(len(arms) for _, arms in traces)
        if not groups and not traces:
            return True
        if self._settings.gpu is None:
            _check_memory(self._settings, self._needed_arms(groups, traces))
        self._store.write_environment(self._environment)
        deadline_s = time.monotonic() + 60 * minutes if minutes else float("inf")
        counts = [(cell, len(self._settings.arms_in(cell))) for _, cell in groups]
        progress = Progress(sum(count for _, count in counts) + num_traces)
        for cell, count in counts:
            progress.expect(cell.name, count)
        for cell, untraced in traces:
            progress.expect(cell.name, len(untraced))
        with interruptible():
            return all(
                self._measure_between_starts(*span, deadline_s, progress)
                for span in self._split_by_starts(groups, traces)
            )

    def _split_by_starts(
        self, groups: Sequence[_Group], traces: Sequence[_Untraced]
    ) -> list[tuple[Sequence[_Group], Sequence[_Untraced]]]:
        """Return what is measured on the same engines, from one start to the next."""
        rounds = self._settings.rounds_per_start
        if rounds is None or not groups:
            return [(groups, traces)]
        spans = [
            list(span)
            for _, span in itertools.groupby(
                groups, key=lambda group: (group[0] - 1) // rounds
            )
        ]
        return [*((span, ()) for span in spans[:-1]), (spans[-1], traces)]

    def _measure_between_starts(
        self,
        groups: Sequence[_Group],
        traces: Sequence[_Untraced],
        deadline_s: float,
        progress: Progress,
    ) -> bool:
        """Start engines and measure on them; return whether there was time for all."""
        if time.monotonic() > deadline_s:
            return False
        if self._settings.gpu is not None:
            self._measure_one_by_one(groups, progress)
            return True
        with self._make_pool() as pool:
            self._start(pool, self._needed_arms(groups, traces), progress)
            for number, cell in groups:
                if time.monotonic() > deadline_s:
                    return False
                self._store.append_group(
                    self._measure_group(pool, number, cell, progress)
                )
                write_results(self._store)
            for cell, untraced in traces:
                if time.monotonic() > deadline_s:
                    return False
                self._trace(pool, cell, untraced, progress)
        return True

    def _measure_one_by_one(self, groups: Sequence[_Group], progress: Progress) -> None:
        """Let each engine measure all groups before the next one starts."""
        finished: dict[_Group, dict[Arm, Finished]] = {group: {} for group in groups}
        for arm in shuffle(self._needed_arms(groups, ()), str(groups[0])):
            with self._make_pool() as pool:
                self._start(pool, [arm], progress)
                for number, cell in groups:
                    if arm not in self._settings.arms_in(cell):
                        continue
                    progress.show(f"round {number} {cell.name} {arm.name}")
                    message = _message(cell, self._requests.make(cell, number))
                    finished[number, cell] |= pool.run({arm: message}, neighbour=False)
        for number, cell in groups:
            self._store.append_group(
                self._note_group(number, cell, finished[number, cell], progress)
            )
        write_results(self._store)

    def _make_pool(self) -> Pool:
        logs = self._store.folder / LOG_FOLDER
        return Pool(logs, self._settings.cpus, Yardstick())

    def _missing_groups(self) -> list[_Group]:
        done = self._store.done()
        return [
            (number, cell)
            for number in range(1, self._settings.rounds + 1)
            for cell in self._settings.cells
            if (number, cell) not in done
        ]

    def _missing_traces(self) -> list[_Untraced]:
        if not self._settings.trace:
            return []
        missing = [
            (
                cell,
                [
                    arm
                    for arm in (
                        *self._settings.arms_in(cell),
                        *self._lending_arms(cell),
                    )
                    if arm.speculates and not self._store.is_traced(cell, arm)
                ],
            )
            for cell in self._settings.cells
            if not is_planning(cell)
        ]
        return [(cell, arms) for cell, arms in missing if arms]

    def _lending_arms(self, cell: Cell) -> tuple[Arm, ...]:
        """Return what is traced for its drafts; drifting cells have no bounds."""
        return () if is_drifting(cell.workload) else self._settings.lending_arms()

    def _needed_arms(
        self,
        groups: Sequence[_Group],
        traces: Sequence[_Untraced],
    ) -> tuple[Arm, ...]:
        """Return the arms of what is missing, in the order of the tables."""
        needed = {arm for _, cell in groups for arm in self._settings.arms_in(cell)}
        needed.update(arm for _, arms in traces for arm in arms)
        known = (*self._settings.arms, *self._settings.lending_arms())
        return tuple(arm for arm in known if arm in needed)

    def _start(self, pool: Pool, arms: Sequence[Arm], progress: Progress) -> None:
        progress.say(f"starting {len(arms)} engines")
        started: list[str] = []

        def on_ready(arm: Arm) -> None:
            started.append(arm.name)
            progress.say(f"  {len(started)}/{len(arms)} {arm.name}")

        pool.start(self._settings, arms, self._requests.eos_token_id, on_ready)
        if any(cell.workload == "drift-neighbour" for cell in self._settings.cells):
            pool.start_neighbour()
        progress.say("warming up")
        for arm in arms:
            for concurrency in self._loads_of(arm):
                self._warm_up(pool, arm, concurrency)

    def _loads_of(self, arm: Arm) -> list[int]:
        """Return the numbers of requests that an arm meets, measured or traced."""
        met = (
            cell
            for cell in self._settings.cells
            if not is_planning(cell) or arm in self._settings.arms_in(cell)
        )
        return sorted({cell.concurrency for cell in met})

    def _warm_up(self, pool: Pool, arm: Arm, concurrency: int) -> None:
        requests = self._requests.make_warm_up(concurrency)
        cell = Cell("mixed", 0.0, concurrency)
        message = _message(cell, requests) | {"max_tokens": WARM_UP_TOKENS}
        pool.run({arm: message}, neighbour=False)

    def _measure_group(
        self, pool: Pool, number: int, cell: Cell, progress: Progress
    ) -> list[dict[str, Any]]:
        """Measure one cell in one round on all arms."""
        requests = self._requests.make(cell, number)
        arms = shuffle(self._settings.arms_in(cell), f"{number} {cell.name}")
        finished = self._take_turns(
            pool,
            {arm: _message(cell, requests) for arm in arms},
            requests,
            f"round {number} {cell.name}",
            progress,
        )
        return self._note_group(number, cell, finished, progress)

    def _note_group(
        self,
        number: int,
        cell: Cell,
        finished: Mapping[Arm, Finished],
        progress: Progress,
    ) -> list[dict[str, Any]]:
        """Return what all arms measured in one cell and round, fit to be kept."""
        measurements: list[dict[str, Any]] = []
        for arm in self._settings.arms_in(cell):
            result = finished[arm].result
            measurements.append(
                {"policy": arm.name, "round": number}
                | cell.as_dict()
                | result
                | {
                    "num_turns": finished[arm].num_turns,
                    "num_disturbed_turns": finished[arm].num_disturbed,
                    "waited_s": finished[arm].waited_s,
                }
            )
            progress.advance(
                cell.name,
                finished[arm].spent_s,
                f"round {number} {cell.name} {arm.name}: "
                f"{result['output_tokens_per_s']:.0f} tokens/s"
                f"{_note_others(result['other_cpu_share'], cell)}",
            )
        differing = find_differing(measurements)
        for measurement in measurements:
            measurement["num_differing_requests"] = differing[measurement["policy"]]
            del measurement["digests"]
        return measurements

    def _trace(
        self, pool: Pool, cell: Cell, arms: Sequence[Arm], progress: Progress
    ) -> None:
        requests = self._requests.make(cell, _TRACED_ROUND)
        paths = {arm: self._store.trace_file(cell, arm.file_name) for arm in arms}
        messages = {
            arm: _message(cell, requests) | {"trace": str(path.absolute())}
            for arm, path in paths.items()
        }
        label = f"traced {cell.name}"
        finished = self._take_turns(pool, messages, requests, label, progress)
        for arm, path in paths.items():
            if not path.exists():
                raise BenchError(
                    f"{arm.name}: its scheduler has no planner to trace; "
                    "run with --no-trace"
                )
            progress.advance(cell.name, finished[arm].spent_s, f"{label} {arm.name}")

    @staticmethod
    def _take_turns(
        pool: Pool,
        messages: dict[Arm, dict[str, Any]],
        requests: Requests,
        label: str,
        progress: Progress,
    ) -> dict[Arm, Finished]:
        turns: Counter[Arm] = Counter()
        pause_every = math.ceil(len(requests.prompts) / TURNS)
        num_turns = math.ceil(len(requests.prompts) / pause_every)

        def on_turn(arm: Arm) -> None:
            turns[arm] += 1
            progress.show(f"{label} {arm.name}, turn {turns[arm]} of {num_turns}")

        return pool.run(
            {arm: one | {"pause_every": pause_every} for arm, one in messages.items()},
            neighbour=requests.neighbour,
            on_turn=on_turn,
        )


def _message(cell: Cell, requests: Requests) -> dict[str, Any]:
    return {
        "prompts": requests.prompts,
        "concurrency": cell.concurrency,
        "temperature": cell.temperature,
        "switch_at": requests.switch_at,
    }


def _note_others(cpu_share: float, cell: Cell) -> str:
    if cell.workload == "drift-neighbour" or cpu_share < WORTH_MENTIONING_SHARE:
        return ""
    return f" (other processes took {cpu_share:.0%} of the machine)"


def _check_memory(settings: BenchSettings, arms: Collection[Arm]) -> None:
    """Refuse to start more engines than there is memory for.

    Raises:
        BenchError: If there is too little; the kernel would end some process, not
            necessarily one of ours.
    """
    engine = settings.engine
    # Not the size of the files: float32 takes twice what bfloat16 takes there.
    weights = DTYPE_BYTES[engine.dtype] * (
        count_parameters(engine.target) + count_parameters(engine.draft)
    )
    needed = [ENGINE_BYTES + weights + engine.kv_cache_of(arm) for arm in arms]
    available = psutil.virtual_memory().available
    if sum(needed) > available:
        raise BenchError(
            f"{len(arms)} engines take about {sum(needed) / 2**30:.1f} GiB and "
            f"{available / 2**30:.1f} GiB are free: name at most "
            f"{available // max(needed)} with --policies, or lower "
            "--target-parameters or --concurrency"
        )
