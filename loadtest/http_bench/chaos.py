"""Chaos: what befalls the server, and when."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from .client_chaos import parse_client_actions
from .deployment import Deployment
from .processes import find_processes

_FORM = re.compile(r"(?P<kind>kill-replica|kill-engine|redeploy)@(?P<part>[\d.]+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_VICTIMS = {"kill-replica": ("replica", "server"), "kill-engine": ("engine",)}
_REDEPLOY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ServerAction:
    """One blow to the server.

    Attributes:
        kind: `kill-replica`, `kill-engine` (SIGKILL, one process) or `redeploy`.
        part: When, as a part of the run.
    """

    kind: str
    part: float


def parse_chaos(text: str) -> tuple[tuple[ServerAction, ...], str]:
    """Read e.g. `kill-replica@0.3,redeploy@0.6,stall@0.5x3=5,drop@0.7x3`.

    Returns:
        What we do to the server, and the rest for the clients, checked.

    Raises:
        ValueError: If something in it is neither.
    """
    server, clients = [], []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _FORM.fullmatch(part)
        if match is None:
            if part.startswith(("kill", "redeploy")):
                raise ValueError(
                    f"{part!r}: write kill-replica@PART, kill-engine@PART or "
                    "redeploy@PART with a part of the run below 1"
                )
            parse_client_actions(part)
            clients.append(part)
        elif not 0 <= float(match["part"]) < 1:
            raise ValueError(f"{part!r}: the part of the run must be below 1")
        else:
            server.append(ServerAction(match["kind"], float(match["part"])))
    return tuple(sorted(server, key=lambda a: a.part)), ",".join(clients)


class ServerChaos:
    """Carries actions out in a thread, counted from the begin of a run.

    Attributes:
        log: What was done: `epoch_s`, `at_s` in the run, `kind`, `what`, and whether
            it was `done` at all.
    """

    def __init__(
        self,
        actions: Sequence[ServerAction],
        deployment: Deployment,
        duration_s: float,
        redeploy_command: str | None,
        say: Callable[[str], None],
    ) -> None:
        """Do nothing yet."""
        self._actions, self._deployment = actions, deployment
        self._duration_s, self._redeploy_command = duration_s, redeploy_command
        self._say = say
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.log: list[dict[str, Any]] = []

    def begin(self, epoch_s: float) -> None:
        """Start the clock.

        Args:
            epoch_s: When the run began.
        """
        self._thread = threading.Thread(target=self._run, args=(epoch_s,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Do nothing more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, epoch_s: float) -> None:
        for action in self._actions:
            due_s = epoch_s + action.part * self._duration_s
            if self._stop.wait(max(0.0, due_s - time.time())):
                return
            began_s = time.time()
            what, done = self._act(action)
            self.log.append(
                {
                    "epoch_s": began_s,
                    "at_s": round(began_s - epoch_s, 3),
                    "kind": action.kind,
                    "what": what,
                    "done": done,
                }
            )
            self._say(f"chaos: {action.kind}: {what}")

    def _act(self, action: ServerAction) -> tuple[str, bool]:
        if action.kind == "redeploy":
            return self._redeploy()
        if self._deployment.pid is None:
            return "give --deployment-pid for a server we did not start", False
        for role, process in find_processes(self._deployment.pid):
            if role in _VICTIMS[action.kind]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
                return f"killed the {role} process {process.pid}", True
        return "there is no such process", False

    def _redeploy(self) -> tuple[str, bool]:
        command = self._redeploy_command
        if command is None:
            return "give --redeploy-command", False
        command = command.replace("{dashboard}", self._deployment.dashboard or "")
        try:
            finished = subprocess.run(
                ["/bin/sh", "-c", command],
                capture_output=True,
                text=True,
                timeout=_REDEPLOY_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{command!r} took more than {_REDEPLOY_TIMEOUT_S:.0f} s", False
        said = _COLOURS.sub("", finished.stdout + finished.stderr)
        last = said.strip().splitlines()[-1:]
        what = f"{command!r} exited with {finished.returncode} {' '.join(last)}".strip()
        return what, finished.returncode == 0
