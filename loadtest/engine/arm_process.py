"""A child process that answers messages, one line of JSON each way."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.client.errors import LoadTestError

_LOG_TAIL_LINES = 15


class ArmProcess:
    """One arm's worker."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log_file: Path
    ) -> None:
        """Start the process.

        Args:
            name: For messages.
            command: What to run.
            env: Its environment.
            log_file: Where its standard error goes.
        """
        self.name = name
        self._log_file = log_file
        with log_file.open("ab") as log:
            # Not in the group that a terminal's Ctrl-C reaches: the controller ends it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(env),
                process_group=0,
            )
        self._buffer = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            LoadTestError: If the process has ended.
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
            LoadTestError: If the process reports an error, ends, or does not answer.
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
        message: dict[str, Any] = json.loads(line)
        if message["event"] == "error":
            raise self._failure(f"failed: {message['message']}")
        return message

    def ask_to_end(self) -> None:
        """Tell it that there is nothing more to do."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait_for_end(self, timeout_s: float) -> None:
        """Give it time to end, and end it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        self._process.kill()
        self._process.wait()
        self.ask_to_end()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _failure(self, what: str) -> LoadTestError:
        lines = self._log_file.read_text(errors="replace").splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])
        return LoadTestError(
            f"{self.name} {what}; the end of {self._log_file}:\n{tail or '  (empty)'}"
        )
