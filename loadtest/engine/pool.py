"""Engines in processes of their own, of which one has work at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.client.errors import LoadTestError
from serving.offline import start_arguments

from .arm_process import ArmProcess
from .arms import COLD
from .plan import Plan

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 1800.0
EXIT_TIMEOUT_S = 15.0

_ENV = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


class Pool:
    """Engines by arm.

    An engine without requests waits for the next message and uses no core, so that all
    the others are as good as gone while one works. A context manager: all processes end
    with it. Should this process be killed, the kernel ends them.
    """

    def __init__(self, plan: Plan, log_folder: Path) -> None:
        """Start nothing yet.

        Args:
            plan: Whose engines these are.
            log_folder: Where the processes' standard error goes; created.
        """
        log_folder.mkdir(parents=True, exist_ok=True)
        self._plan = plan
        self._log_folder = log_folder
        self._arms: dict[Arm, ArmProcess] = {}

    def __enter__(self) -> Pool:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes: politely after a run, at once after an error."""
        deadline_s = time.monotonic()
        if error[0] is None:
            deadline_s += EXIT_TIMEOUT_S
            for process in self._arms.values():
                process.ask_to_end()
        for process in self._arms.values():
            process.wait_for_end(deadline_s - time.monotonic())

    def start(
        self, arms: Sequence[Arm], eos_token_id: int, on_ready: Callable[[Arm], None]
    ) -> None:
        """Start the engines of some arms, as many at once as this machine has cores.

        Args:
            arms: Whose engines.
            eos_token_id: Ends a reply.
            on_ready: Called with each arm whose engine has started.
        """
        width = len(os.sched_getaffinity(0))
        for first in range(0, len(arms), width):
            batch = arms[first : first + width]
            for arm in batch:
                self._spawn(arm, eos_token_id)
            for arm in batch:
                self._arms[arm].receive(START_TIMEOUT_S)
                on_ready(arm)

    def run(
        self, arm: Arm, message: Mapping[str, Any], *, neighbour: bool = False
    ) -> dict[str, Any]:
        """Run requests on an arm's engine.

        Args:
            arm: Whose engine.
            message: Arguments of `ArmEngine.run`.
            neighbour: Whether another process takes a core once conditions change: that
                of the engine's main thread, the first one it may use.

        Returns:
            What it measured.
        """
        process = self._arms[arm]
        process.send({"do": "run", **message})
        answer = process.receive(RUN_TIMEOUT_S)
        beside: subprocess.Popen[bytes] | None = None
        try:
            while answer["event"] == "switch":
                if neighbour:
                    beside = self._spawn_neighbour()
                answer = process.receive(RUN_TIMEOUT_S)
        finally:
            if beside is not None:
                beside.kill()
                beside.wait()
        result: dict[str, Any] = answer["result"]
        return result

    def _spawn(self, arm: Arm, eos_token_id: int) -> None:
        try:
            arguments, env = start_arguments(self._plan.deployment(arm))
        except ValueError as error:
            raise LoadTestError(f"--policies {arm.name}: {error}") from None
        process = self._arms[arm] = ArmProcess(
            f"the engine of {arm.name}",
            [sys.executable, "-m", f"{__package__}.worker", str(os.getpid())],
            os.environ | env | _ENV,
            self._log_folder / f"{arm.file_name}.log",
        )
        process.send(
            {
                "do": "start",
                "arguments": arguments,
                "eos_token_id": eos_token_id,
                "max_tokens": self._plan.max_tokens,
                "hold_at_zero": arm.policy == COLD,
            }
        )

    def _spawn_neighbour(self) -> subprocess.Popen[bytes]:
        own = [str(os.getpid()), str(self._plan.cpus[0])]
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.neighbour", *own]
        )
