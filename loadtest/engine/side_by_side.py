"""Engines side by side, that answer the same requests in turn."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from loadtest.arms import Arm
from loadtest.experiment import Cell, Experiment, Turn, shuffle
from loadtest.result_folder import ResultFolder

from .pool import EngineProcess, start_engines
from .workloads import RequestMaker

A = TypeVar("A", bound=Arm)


class SideBySide(Experiment[A, Cell, Mapping[A, EngineProcess]], Generic[A, Cell]):
    """What the machine does from one moment to the next meets all arms alike.

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
        """Check that what the folder holds was measured under the same conditions."""
        self.requests, self.spent_s = requests, dict[A, float]()
        super().__init__(folder, {**conditions, "seed": requests.seed}, models, gpu)

    @contextmanager
    def start_warm(
        self,
        arms: Sequence[A],
        deploy: Callable[[A], Mapping[str, Any]],
        in_flight: set[int],
    ) -> Iterator[Mapping[A, EngineProcess]]:
        """Start engines anew, and warm them up with so many requests in flight."""
        logs, say = self.folder.folder / "logs", self.progress.say
        with start_engines(arms, deploy, logs, say) as engines:
            for concurrency in sorted(in_flight):
                warm_up = self.requests.make_warm_up(concurrency)
                for arm, engine in engines.items():
                    label = f"warming up {arm.name}, {concurrency} in flight"
                    self.progress.show(label)
                    engine.ask("run", warm_up)
            yield engines

    def ask_in_turn(
        self,
        turn: Turn[A, Cell],
        cell: Cell,
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
