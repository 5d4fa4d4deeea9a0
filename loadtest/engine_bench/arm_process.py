"""A child process that answers messages and can be stopped between them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from .errors import BenchError

STOP_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 15


class ArmProcess:
    """One arm's worker, or the neighbour."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_file: Path,
        group: int,
    ) -> None:
        """Start the process.

        Args:
            name: For messages.
            command: What to run.
            env: Its environment.
            log_file: Where its standard error goes.
            group: Process group to join; 0 founds a new one.
        """
        self.name = name
        self._log_file = log_file
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(env),
                process_group=group,
            )
        self._buffer = b""
        self._members: list[psutil.Process] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            BenchError: If the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            BenchError: If the process reports an error, ends, or does not answer.
        """
        message: dict[str, Any] = json.loads(self.receive_line(timeout_s))
        if message["event"] == "error":
            raise self._failure(f"failed: {message['message']}")
        return message

    def receive_line(self, timeout_s: float) -> bytes:
        """Wait for the next line of standard output.

        Raises:
            BenchError: If the process ends or does not answer.
        """
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
                raise self._failure(f"did not answer for {timeout_s:.0f} s")
            chunk = os.read(output, 1 << 16)
            if not chunk:
                raise self._failure("has ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def stop(self) -> None:
        """Stop it where it is (SIGSTOP), and see to it that it has stopped.

        Raises:
            BenchError: If it goes on running.
        """
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while not self.is_stopped():
            if time.monotonic() > deadline_s:
                raise self._failure(f"still runs {STOP_TIMEOUT_S:.0f} s after SIGSTOP")
            time.sleep(0.002)

    def resume(self) -> None:
        """Let it go on."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def is_stopped(self) -> bool:
        """Tell whether the process and all its children are stopped."""
        return all(map(_is_stopped, self._family()))

    def ask_to_end(self) -> None:
        """Let it go on, with nothing more to do."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._close_pipe(self._process.stdin)

    def wait_for_end(self, timeout_s: float) -> None:
        """Give it time to end, and end it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._close_pipe(self._process.stdin)
        self._close_pipe(self._process.stdout)

    @staticmethod
    def _close_pipe(pipe: IO[bytes] | None) -> None:
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _family(self) -> list[psutil.Process]:
        """Return the process and the children it had when it was first stopped.

        By then its engine has started; looking for more costs milliseconds a turn.
        """
        if self._process.poll() is not None:
            raise self._failure("has ended")
        if self._members is None:
            process = psutil.Process(self.pid)
            self._members = [process, *process.children(recursive=True)]
        return self._members

    def _failure(self, what: str) -> BenchError:
        lines = self._log_file.read_text(errors="replace").splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])
        return BenchError(
            f"{self.name} {what}; the end of {self._log_file}:\n{tail or '  (empty)'}"
        )


def _is_stopped(process: psutil.Process) -> bool:
    try:
        if not process.is_running():
            return True  # Its number may be another process's by now.
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
