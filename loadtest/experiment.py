"""Arms in turn until all is measured, in pieces: what all benchmarks share."""

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from .environment import describe_machine, describe_piece, describe_versions
from .interrupts import interruptible
from .model_files import describe_model
from .progress import Progress
from .result_folder import ResultFolder

Arm = TypeVar("Arm")
Cell = TypeVar("Cell")
Started = TypeVar("Started")
T = TypeVar("T")


class Turn(NamedTuple, Generic[Arm, Cell]):
    """Arms that are up at the same time, and the cells that they go through."""

    round: int
    arms: Sequence[Arm]
    cells: Sequence[Cell]


class Experiment(ABC, Generic[Arm, Cell, Started]):
    """One invocation on one output folder.

    Attributes:
        rounds: How often every arm goes through every cell.
        folder: Where results go.
        piece: Which invocation on it this is, from 1.
        progress: Of what is missing when it begins.
    """

    rounds = 1

    def __init__(
        self,
        folder: ResultFolder,
        conditions: Mapping[str, Any],
        models: Mapping[str, Path],
        gpu: str | None = None,
    ) -> None:
        """Check that what the folder holds was measured under the same conditions.

        Machine, versions and models, by role, are among them.
        """
        machine, versions = describe_machine(gpu), describe_versions()
        described = {role: describe_model(path) for role, path in models.items()}
        # One entry each, so that a refusal to go on names what has changed.
        origin = {role: one["digest"] for role, one in described.items()}
        origin |= {f"version of {name}": one for name, one in versions.items()}
        folder.check_conditions({**conditions, **origin, "cpu": machine["cpu"]})
        pieces = folder.environment().get("pieces", [])
        self._environment = {
            "machine": machine,
            "models": described,
            "versions": versions,
            "pieces": [*pieces, describe_piece()],
        }
        self.folder, self.piece, self.progress = folder, len(pieces) + 1, Progress(0)

    @abstractmethod
    def plan_round(self, number: int) -> Iterable[tuple[Sequence[Arm], Sequence[Cell]]]:
        """Return arms that are up together, and their cells, in order."""

    @abstractmethod
    def place(self, number: int, arm: Arm, cell: Cell) -> dict[str, Any]:
        """Return what in a measurement says which it is."""

    @abstractmethod
    def start(self, turn: Turn[Arm, Cell]) -> AbstractContextManager[Started]:
        """Have the arms of a turn up, and warm, while a block runs."""

    @abstractmethod
    def measure_cell(self, turn: Turn[Arm, Cell], cell: Cell, up: Started) -> None:
        """Measure a cell, keep it, and tell the progress."""

    @abstractmethod
    def name_of(self, cell: Cell) -> str:
        """Return a cell's name, by which durations are estimated."""

    def may_stop(self, turn: Turn[Arm, Cell]) -> bool:  # noqa: ARG002
        """Tell whether what is kept so far is of use without the rest of a turn."""
        return True

    def find_turns(self) -> list[Turn[Arm, Cell]]:
        """Return what is still to be measured, in order."""
        kept, turns = self.folder.measurements(), []

        def is_done(number: int, arm: Arm, cell: Cell) -> bool:
            place = self.place(number, arm, cell).items()
            return any(place <= one.items() for one in kept)

        for number in range(1, self.rounds + 1):
            for arms, cells in self.plan_round(number):
                missing = [
                    cell
                    for cell in cells
                    if not all(is_done(number, arm, cell) for arm in arms)
                ]
                if missing:
                    turns.append(Turn(number, arms, missing))
        return turns

    def measure(self, minutes: float | None = None) -> bool:
        """Measure what is missing; every finished cell is kept.

        With a limit nothing new begins after so many minutes.

        Returns:
            Whether everything has been measured.
        """
        turns = self.find_turns()
        if not turns:
            return True
        self.folder.write_environment(self._environment)
        limit_s = math.inf if minutes is None else 60 * minutes
        deadline_s = time.monotonic() + limit_s
        self.progress = Progress(sum(len(t.cells) * len(t.arms) for t in turns))
        for turn in turns:
            for cell in turn.cells:
                self.progress.expect(self.name_of(cell), len(turn.arms))

        def is_over(turn: Turn[Arm, Cell]) -> bool:
            return time.monotonic() > deadline_s and self.may_stop(turn)

        with interruptible():
            for turn in turns:
                if is_over(turn):
                    return False
                with self.start(turn) as up:
                    for cell in turn.cells:
                        if is_over(turn):
                            return False
                        self.measure_cell(turn, cell, up)
        return True


def shuffle(arms: Sequence[T], key: str) -> list[T]:
    """Return the arms in an order of the key's, so that what drifts falls on all alike.

    With other keys every arm comes first and last, and after every other one.
    """
    return random.Random(key).sample(arms, len(arms))
