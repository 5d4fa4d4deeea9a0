"""Chaos: what befalls the server and its clients' streams, and what came of it."""

from __future__ import annotations

import argparse
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from loadtest.client.errors import LoadTestError
from loadtest.client.outcome import Outcome
from loadtest.load.client_chaos import parse_client_actions

from .deployment import Deployment
from .processes import find_processes

_FORM = re.compile(r"(?P<kind>kill-replica|kill-engine|redeploy)@(?P<part>[\d.]+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_VICTIMS = {"kill-replica": ("replica", "server"), "kill-engine": ("engine",)}
_REDEPLOY_TIMEOUT_S = 600.0
_LOOK_PERIOD_S = 1.0


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

    Returns what we do to the server, and the rest for the clients, checked.

    Raises:
        ValueError: If something in it is neither.
    """
    server, clients = [], []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _FORM.fullmatch(part)
        if match is not None and 0 <= float(match["part"]) < 1:
            server.append(ServerAction(match["kind"], float(match["part"])))
        elif part.startswith(("kill", "redeploy")):
            raise ValueError(
                f"{part!r}: write kill-replica@PART, kill-engine@PART or "
                "redeploy@PART with a part of the run below 1"
            )
        else:
            parse_client_actions(part)
            clients.append(part)
    return tuple(sorted(server, key=lambda a: a.part)), ",".join(clients)


def check_chaos(options: argparse.Namespace) -> None:
    """Refuse what could not be done when its time came, and say what to give."""
    kinds = {action.kind for action in parse_chaos(options.chaos)[0]}
    if kinds and options.requests:
        raise LoadTestError(
            f"--chaos {min(kinds)}@PART is a part of --duration, and with --requests a "
            "run ends when it will; leave --requests out"
        )
    rivals = [arm.name for arm in options.arms if not arm.policy or arm.is_plain_vllm]
    if "redeploy" in kinds and options.redeploy_command is None and rivals:
        raise LoadTestError(
            f"--chaos redeploy needs --redeploy-command for {rivals[0]}, which we do "
            "not serve"
        )
    attached = [arm.name for arm in options.arms if arm.url is not None]
    if not attached or not (kinds or options.soak):
        return
    if options.deployment_pid is None or len(attached) > 1:
        raise LoadTestError(
            f"--soak and chaos of {' and '.join(attached)}, which run already, need "
            "--deployment-pid, and that is the one of a single arm"
        )


class ServerChaos:
    """Carries actions out in a thread, counted from the begin of a run.

    Attributes:
        log: What was done: `epoch_s`, `at_s` in the run (both None for what never
            began), `kind`, `what`, and whether it was `done` at all. A redeploy is done
            when every replica has been replaced, and the run still goes on.
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
        """Start the clock: the run began at `epoch_s`."""
        self._thread = threading.Thread(target=self._run, args=(epoch_s,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Do nothing more, and put what is left into the log."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for action in self._actions[len(self.log) :]:
            due_s = action.part * self._duration_s
            what = f"at {due_s:.0f} s the run was over, or what came before was not"
            self._note(action.kind, None, None, what, False)

    def _run(self, epoch_s: float) -> None:
        for action in self._actions:
            due_s = epoch_s + action.part * self._duration_s
            if self._stop.wait(max(0.0, due_s - time.time())):
                return
            began_s = time.time()
            at_s = round(began_s - epoch_s, 3)
            self._note(action.kind, began_s, at_s, *self._act(action.kind))

    def _note(
        self,
        kind: str,
        epoch_s: float | None,
        at_s: float | None,
        what: str,
        done: bool,
    ) -> None:
        when = {"epoch_s": epoch_s, "at_s": at_s}
        self.log.append(when | {"kind": kind, "what": what, "done": done})
        self._say(f"chaos: {kind}: {what}")

    def _act(self, kind: str) -> tuple[str, bool]:
        if self._deployment.pid is None:
            return "give --deployment-pid for a server we did not start", False
        if kind == "redeploy":
            return self._redeploy(self._deployment.pid)
        for role, process in find_processes(self._deployment.pid):
            if role in _VICTIMS[kind]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
                return f"killed the {role} process {process.pid}", True
        return "there is no such process", False

    def _redeploy(self, pid: int) -> tuple[str, bool]:
        command = self._redeploy_command or self._deployment.redeploy_command
        if command is None:
            return "give --redeploy-command", False
        # Ours holds paths, which are nobody's business in a report.
        name = repr(command) if self._redeploy_command else "the redeploy"
        command = command.replace("{dashboard}", self._deployment.dashboard or "")
        before, began_s = _find_replicas(pid), time.monotonic()
        try:
            finished = subprocess.run(
                ["/bin/sh", "-c", command],
                capture_output=True,
                text=True,
                timeout=_REDEPLOY_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{name} took more than {_REDEPLOY_TIMEOUT_S:.0f} s", False
        said = _COLOURS.sub("", finished.stdout + finished.stderr)
        last = said.strip().splitlines()[-1:]
        what = f"{name} exited with {finished.returncode} {' '.join(last)}".strip()
        if finished.returncode != 0:
            return what, False
        # Serve has only taken the order so far.
        after = self._wait_for_others(pid, before)
        took_s = time.monotonic() - began_s
        what += f"; after {took_s:.0f} s replicas {_list(before)}"
        if before and after and not before & after:
            return f"{what} were replaced by {_list(after)}", True
        return f"{what} are not replaced, there are {_list(after)}", False

    def _wait_for_others(self, pid: int, before: set[int]) -> set[int]:
        """Return the replicas when all are new ones, or the time or the run is over."""
        deadline_s = time.monotonic() + _REDEPLOY_TIMEOUT_S
        is_over = False
        while True:
            after = _find_replicas(pid)
            if is_over or (after and not after & before):
                return after
            is_over = self._stop.wait(_LOOK_PERIOD_S) or time.monotonic() > deadline_s


def _find_replicas(pid: int) -> set[int]:
    roles = _VICTIMS["kill-replica"]
    return {process.pid for role, process in find_processes(pid) if role in roles}


def _list(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids))) or "none"


def log_client_actions(
    text: str, outcomes: Sequence[Outcome], duration_s: float, num_processes: int
) -> list[dict[str, Any]]:
    """Return what came of each action of clients, as rows beside the server's.

    Every process of the client carries out all actions. There is no single moment, so
    `epoch_s` is None; `num_streams` is how many it befell, `done` whether any.
    """
    left = sorted((o for o in outcomes if o.chaos), key=lambda one: one.sent_s)
    rows = []
    for action in sorted(parse_client_actions(text), key=lambda one: one.part):
        kind, due_s = action.misbehaviour.name, action.part * duration_s
        count = action.count * num_processes
        own = [o for o in left if o.chaos == kind and o.sent_s >= due_s][:count]
        left = [outcome for outcome in left if outcome not in own]
        what = f"befell {len(own)} of {count} streams"
        row = {"epoch_s": None, "at_s": round(due_s, 3), "kind": kind, "what": what}
        rows.append(row | {"num_streams": len(own), "done": bool(own)})
    return rows
