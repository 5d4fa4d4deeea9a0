"""Chaos: what befalls the server and its clients' streams, and what came of it."""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from loadtest.client.errors import LoadTestError
from loadtest.client.outcome import CLIENT_DROPPED, Outcome

from .deployment import Deployment
from .processes import find_processes

_FORM = re.compile(
    r"(?P<kind>kill-replica|kill-engine|redeploy)@(?P<part>0?\.\d+|0)"
    r"|drop=(?P<share>0?\.\d+)"
)
VICTIMS = {"replica": ("replica", "server"), "engine": ("engine",), "front": ("front",)}
"""Roles of the processes that each kind of kill may hit."""

_REDEPLOY_TIMEOUT_S = 600.0
_LOOK_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Chaos:
    """What is to befall a run.

    Attributes:
        blows: Kinds (`kill-replica`, `kill-engine`: SIGKILL, one process; `redeploy`)
            and when, as a part of the run, in order.
        drop_share: Of streams, which their clients close at the first token.
    """

    blows: tuple[tuple[str, float], ...] = ()
    drop_share: float = 0.0


def parse_chaos(text: str) -> Chaos:
    """Read e.g. `kill-replica@0.3,redeploy@0.6,drop=0.05`.

    Raises:
        ValueError: If something in it is neither.
    """
    blows, share = [], 0.0
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _FORM.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{part!r}: write kill-replica@PART, kill-engine@PART or redeploy@PART "
                "with a part of the run below 1, or drop=SHARE of streams"
            )
        if match["kind"]:
            blows.append((match["kind"], float(match["part"])))
        share = float(match["share"] or share)
    return Chaos(tuple(sorted(blows, key=lambda blow: blow[1])), share)


def check_chaos(options: argparse.Namespace) -> None:
    """Refuse what could not be done when its time came, and say what to give."""
    kinds = {kind for kind, _ in options.chaos.blows}
    if kinds and options.requests:
        raise LoadTestError(
            f"--chaos {min(kinds)}@PART is a part of --duration, and with --requests a "
            "run ends when it will; leave --requests out"
        )
    rivals = [arm.name for arm in options.arms if not arm.policy or arm.is_plain_vllm]
    if "redeploy" in kinds and rivals:
        raise LoadTestError(f"--chaos redeploy: {rivals[0]} is not served by us")
    attached = [arm.name for arm in options.arms if arm.url is not None]
    if not attached or not (kinds or options.soak):
        return
    if options.deployment_pid is None or len(attached) > 1:
        raise LoadTestError(
            f"--soak and chaos of {' and '.join(attached)}, which run already, need "
            "--deployment-pid, and that is the one of a single arm"
        )


class ServerChaos:
    """Carries blows out in a thread, counted from the begin of a run.

    Attributes:
        log: What was done: `epoch_s`, `at_s` in the run (both None for what never
            began), `kind`, `what`, and whether it was `done` at all. A redeploy is done
            when every replica has been replaced, and the run still goes on.
    """

    def __init__(
        self,
        blows: Sequence[tuple[str, float]],
        deployment: Deployment,
        duration_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Do nothing yet."""
        self._blows, self._deployment = blows, deployment
        self._duration_s, self._say = duration_s, say
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
        for kind, part in self._blows[len(self.log) :]:
            due_s = part * self._duration_s
            what = f"at {due_s:.0f} s the run was over, or what came before was not"
            self._note(kind, None, None, what, False)

    def _run(self, epoch_s: float) -> None:
        for kind, part in self._blows:
            due_s = epoch_s + part * self._duration_s
            if self._stop.wait(max(0.0, due_s - time.time())):
                return
            began_s = time.time()
            what, done = self._act(kind)
            self._note(kind, began_s, round(began_s - epoch_s, 3), what, done)

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
        pid = self._deployment.pid
        assert pid is not None  # Else it was refused.
        if kind == "redeploy":
            return self._redeploy(pid)
        role = kind.removeprefix("kill-")
        for process in find_victims(pid, role):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            return f"killed the {role} process {process.pid}", True
        return "there is no such process", False

    def _redeploy(self, pid: int) -> tuple[str, bool]:
        assert self._deployment.redeploy is not None  # Else it was refused.
        before, began_s = _replicas(pid), time.monotonic()
        try:
            self._deployment.redeploy()
        except LoadTestError as error:
            return str(error), False
        # Serve has only taken the order so far.
        while True:
            after, took_s = _replicas(pid), time.monotonic() - began_s
            if before and after and not before & after:
                what = (
                    f"after {took_s:.0f} s replicas {before} were replaced by {after}"
                )
                return what, True
            if took_s > _REDEPLOY_TIMEOUT_S or self._stop.is_set():
                return f"replicas {before} are not replaced, there are {after}", False
            self._stop.wait(_LOOK_PERIOD_S)


def find_victims(pid: int, kind: str) -> list[psutil.Process]:
    """Return the processes of a deployment that a kind of kill may hit."""
    return [one for role, one in find_processes(pid) if role in VICTIMS[kind]]


def _replicas(pid: int) -> set[int]:
    return {process.pid for process in find_victims(pid, "replica")}


def log_drops(share: float, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return what came of dropping streams, as a row beside the server's, if any."""
    if not share:
        return []
    count = sum(one.failure == CLIENT_DROPPED for one in outcomes)
    what = f"befell {count} of {len(outcomes)} streams"
    row = {"epoch_s": None, "at_s": None, "kind": "drop", "what": what}
    return [row | {"num_streams": count, "done": count > 0}]
