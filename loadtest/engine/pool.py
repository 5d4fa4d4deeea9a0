"""Engines in processes of their own, of which one has work at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.client.errors import LoadTestError
from loadtest.result_folder import read_tail
from serving.offline import start_arguments

from .plan import Block, Plan
from .worker import serve

_START_TIMEOUT_S = 600.0
_RUN_TIMEOUT_S = 1800.0
_ENV = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}


class EngineProcess:
    """One arm's engine.

    Without requests it waits for the next ones and uses no core, so that all others
    are as good as gone while one works.
    """

    def __init__(self, plan: Plan, arm: Arm, log_folder: Path) -> None:
        """Start the process, whose standard error goes into a file of the folder."""
        try:
            arguments, env = start_arguments(plan.deployment(arm))
        except ValueError as error:
            raise LoadTestError(f"--policies {arm.name}: {error}") from None
        self._name, self._log_file = arm.name, log_folder / f"{arm.file_name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        engine = theirs, self._log_file, arguments
        self._process = context.Process(target=serve, args=engine)
        ours = dict(os.environ)
        os.environ.update(env | _ENV)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(ours)
        theirs.close()

    def run(self, block: Block, trace: Path | None = None) -> dict[str, Any]:
        """Run requests, as `ArmEngine.run` does; an error if it fails or is silent."""
        try:
            self._connection.send((block, trace))
        except BrokenPipeError:
            raise self._failure("has ended") from None
        found: dict[str, Any] = self.receive(_RUN_TIMEOUT_S)
        return found

    def receive(self, timeout_s: float) -> Any:
        """Wait for an answer; that it has started is the first.

        Raises:
            LoadTestError: If it fails or does not answer.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise self._failure(f"did not answer for {timeout_s:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure("has ended") from None
        if isinstance(answer, str):
            raise self._failure(f"failed: {answer}")
        return answer

    def end(self) -> None:
        """End it: whatever it is at, there is nothing to keep."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _failure(self, what: str) -> LoadTestError:
        log = self._log_file
        return LoadTestError(
            f"the engine of {self._name} {what}; the end of {log}:\n{read_tail(log)}"
        )


@contextmanager
def start_engines(
    plan: Plan, arms: Sequence[Arm], log_folder: Path, say: Callable[[str], None]
) -> Iterator[dict[Arm, EngineProcess]]:
    """Yield engines by arm, ready; end them all.

    As many start at once as this machine has cores.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    engines: dict[Arm, EngineProcess] = {}
    try:
        say(f"starting {len(arms)} engines")
        width = len(os.sched_getaffinity(0))
        for first in range(0, len(arms), width):
            batch = arms[first : first + width]
            for arm in batch:
                engines[arm] = EngineProcess(plan, arm, log_folder)
            for arm in batch:
                engines[arm].receive(_START_TIMEOUT_S)
                say(f"  {arm.name} is ready")
        yield engines
    finally:
        for engine in engines.values():
            engine.end()
