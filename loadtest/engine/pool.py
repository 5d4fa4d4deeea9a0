"""Engines in processes of their own, of which one has work at a time."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from loadtest.arms import Arm
from loadtest.errors import LoadTestError
from loadtest.result_folder import read_tail
from serving.offline import start_arguments

from .plan import COLD
from .worker import ArmEngine, serve

_START_TIMEOUT_S = 600.0
_RUN_TIMEOUT_S = 3600.0
_ENV = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    # Engines are killed; what cleans up after them need not tell how much that was.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}

A = TypeVar("A", bound=Arm)


class EngineProcess:
    """One arm's engine.

    Without requests it waits for the next ones and uses no core, so that all others
    are as good as gone while one works.
    """

    def __init__(
        self,
        name: str,
        deployment: Mapping[str, Any],
        log_file: Path,
        make: Callable[[Mapping[str, Any]], Any] = ArmEngine,
    ) -> None:
        """Start the process, whose standard error goes into the file.

        What `make` makes of an engine's arguments answers there.
        """
        try:
            arguments, env = start_arguments(deployment)
        except ValueError as error:
            raise LoadTestError(f"{name}: {error}") from None
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._name, self._log_file = name, log_file
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        engine = theirs, log_file, partial(make, arguments)
        self._process = context.Process(target=serve, args=engine)
        ours = dict(os.environ)
        os.environ.update(env | _ENV)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(ours)
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until it has started; an error if it fails."""
        self._receive(_START_TIMEOUT_S)

    def close(self) -> None:
        """End it: whatever it is at, there is nothing to keep."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def ask(self, *message: Any) -> dict[str, Any]:
        """Call a method of what `make` made, by name and arguments; return its answer.

        An error if it fails or is silent.
        """
        try:
            self._connection.send(message)
        except BrokenPipeError:
            raise self._failure("has ended") from None
        found: dict[str, Any] = self._receive(_RUN_TIMEOUT_S)
        return found

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise self._failure(f"did not answer for {timeout_s:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure("has ended") from None
        if isinstance(answer, str):
            raise self._failure(f"failed: {answer}")
        return answer

    def _failure(self, what: str) -> LoadTestError:
        log = self._log_file
        return LoadTestError(
            f"the engine of {self._name} {what}; the end of {log}:\n{read_tail(log)}"
        )


@contextmanager
def start_engines(
    arms: Sequence[A],
    deploy: Callable[[A], Mapping[str, Any]],
    log_folder: Path,
    say: Callable[[str], None],
    make: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Iterator[dict[A, EngineProcess]]:
    """Yield engines by arm, ready, each deployed as asked; end them all.

    As many start at once as this machine has cores.
    """
    engines: dict[A, EngineProcess] = {}
    try:
        say(f"starting {len(arms)} engines")
        width = len(os.sched_getaffinity(0))
        for first in range(0, len(arms), width):
            batch = arms[first : first + width]
            for arm in batch:
                engines[arm] = EngineProcess(
                    arm.name,
                    deploy(arm),
                    log_folder / f"{arm.file_name}.log",
                    make or partial(ArmEngine, hold_at_zero=arm.policy == COLD),
                )
            for arm in batch:
                engines[arm].wait_until_ready()
                say(f"  {arm.name} is ready")
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
