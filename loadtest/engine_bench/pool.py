"""All arms' processes: one process group, of which one member runs at a time."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loadtest

from .arm_process import ArmProcess
from .arms import Arm
from .preload import engine_env
from .settings import BenchSettings
from .yardstick import Yardstick

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 1800.0
EXIT_TIMEOUT_S = 15.0
_REPO = Path(loadtest.__file__).resolve().parents[1]


@dataclass(slots=True)
class Finished:
    """What a worker measured, and how its turns went.

    Attributes:
        result: What it measured; empty before its last turn.
        spent_s: How long its turns took in all.
        num_turns: How many they were.
        num_disturbed: In how many the machine was not itself.
        waited_s: How long they waited for it to be.
    """

    result: dict[str, Any] = field(default_factory=dict)
    spent_s: float = 0.0
    num_turns: int = 0
    num_disturbed: int = 0
    waited_s: float = 0.0


class Pool:
    """Engines by arm, and the neighbour, all stopped but for the one whose turn it is.

    A context manager: all processes end with it. Should this process be killed, the
    kernel ends them.
    """

    def __init__(
        self, log_folder: Path, cpus: Sequence[int], yardstick: Yardstick | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            log_folder: Where the processes' standard error goes; created.
            cpus: Cores of the engines; the neighbour takes the first one.
            yardstick: Looks at the machine between turns; nobody does without.
        """
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = log_folder
        self._cpus = cpus
        self._yardstick = yardstick
        self._env = engine_env(os.environ, cpus, _REPO)
        self._arms: dict[Arm, ArmProcess] = {}
        self._neighbour: ArmProcess | None = None

    def __enter__(self) -> Pool:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes: politely after a run, at once after an error."""
        if self._neighbour is not None:
            self._neighbour.kill()
        deadline_s = time.monotonic()
        if error[0] is None:
            deadline_s += EXIT_TIMEOUT_S
            for process in self._arms.values():
                process.ask_to_end()
        for process in self._arms.values():
            process.wait_for_end(deadline_s - time.monotonic())

    def start(
        self,
        settings: BenchSettings,
        arms: Sequence[Arm],
        eos_token_id: int,
        on_ready: Callable[[Arm], None],
    ) -> None:
        """Start the engines of some arms, as many at once as this machine has cores.

        Args:
            settings: Of the run.
            arms: Whose engines.
            eos_token_id: Ends a reply.
            on_ready: Called with each arm whose engine has started.
        """
        width = len(os.sched_getaffinity(0))
        for first in range(0, len(arms), width):
            batch = arms[first : first + width]
            for arm in batch:
                self._arms[arm] = self._spawn(
                    f"the engine of {arm.name}", arm.file_name, "worker", []
                )
                self._arms[arm].send(
                    {
                        "do": "start",
                        "llm": settings.engine.llm_args(arm),
                        "eos_token_id": eos_token_id,
                        "max_tokens": settings.max_tokens,
                        "held_at_zero": arm.held_at_zero,
                    }
                )
            for arm in batch:
                self._arms[arm].receive(START_TIMEOUT_S)
                self._arms[arm].stop()
                on_ready(arm)

    def start_neighbour(self) -> None:
        """Start the neighbour, stopped.

        It shares the core of the engine's main thread. The others look for work by
        yielding, for which Linux from 6.18 on charges a whole slice of time: beside one
        of them a neighbour took all but a fiftieth of the core.
        """
        arguments = [str(self._cpus[0])]
        self._neighbour = self._spawn(
            "the neighbour", "neighbour", "neighbour", arguments
        )
        self._neighbour.receive_line(START_TIMEOUT_S)
        self._neighbour.stop()

    def run(
        self,
        messages: Mapping[Arm, Mapping[str, Any]],
        *,
        neighbour: bool,
        on_turn: Callable[[Arm], None] | None = None,
    ) -> dict[Arm, Finished]:
        """Run requests on the engines of some arms, one of which runs at a time.

        An arm's turn ends where its message says (`pause_every`), so that all arms
        meet what the machine does from one second to the next.

        Args:
            messages: By arm, in the order of their turns, for its worker.
            neighbour: Whether the neighbour joins an arm whose conditions change.
            on_turn: Called with the arm before each of its turns.

        Returns:
            What the workers measured.
        """
        waiting = deque(
            (arm, {"do": "run", **message}) for arm, message in messages.items()
        )
        finished = {arm: Finished() for arm in messages}
        has_neighbour: set[Arm] = set()
        while waiting:
            arm, message = waiting.popleft()
            if on_turn is not None:
                on_turn(arm)
            own = finished[arm]
            with self._turn(arm, own, with_neighbour=arm in has_neighbour) as process:
                process.send(message)
                answer = process.receive(RUN_TIMEOUT_S)
                while answer["event"] == "switch":
                    if neighbour and self._neighbour is not None:
                        has_neighbour.add(arm)
                        self._neighbour.resume()
                    answer = process.receive(RUN_TIMEOUT_S)
            if answer["event"] == "pause":
                waiting.append((arm, {"do": "continue"}))
            else:
                own.result = answer["result"]
        return finished

    @contextmanager
    def _turn(
        self, arm: Arm, own: Finished, *, with_neighbour: bool
    ) -> Iterator[ArmProcess]:
        """Let one arm's process run, and stop it and the neighbour afterwards."""
        process = self._arms[arm]
        for other in self._processes():
            if other is not process and not other.is_stopped():
                other.stop()
        is_calm = True
        if self._yardstick is not None:
            look = self._yardstick.before_turn()
            is_calm = look.is_calm
            own.waited_s += look.waited_s
        began_s = time.monotonic()
        process.resume()
        if with_neighbour and self._neighbour is not None:
            self._neighbour.resume()
        yield process
        if self._neighbour is not None:
            self._neighbour.stop()
        process.stop()
        own.spent_s += time.monotonic() - began_s
        if self._yardstick is not None:
            is_calm &= self._yardstick.after_turn()
        own.num_turns += 1
        own.num_disturbed += not is_calm

    def _spawn(
        self, name: str, log_name: str, module: str, arguments: Sequence[str]
    ) -> ArmProcess:
        return ArmProcess(
            name,
            [
                sys.executable,
                "-m",
                f"{__package__}.{module}",
                str(os.getpid()),
                *arguments,
            ],
            self._env,
            self._log_folder / f"{log_name}.log",
            group=next((p.pid for p in self._processes()), 0),
        )

    def _processes(self) -> list[ArmProcess]:
        arms = list(self._arms.values())
        return arms if self._neighbour is None else [*arms, self._neighbour]
