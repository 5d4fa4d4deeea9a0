"""Chaos: what befalls the server and its clients' streams, and what came of it."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
VICTIMS = {"engine": ("engine",), "replica": ("replica", "server"), "front": ("front",)}
"""Roles of the processes that each kind of kill may hit."""

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
    if attached and (kinds or options.soak):
        raise LoadTestError(
            f"--soak and chaos need the processes of {attached[0]}, which runs "
            f"already: have us start it, --arm '{attached[0]}=cmd:...'"
        )


class ServerChaos:
    """Carries blows out, each when its moment has come and the one before is done.

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
        self._left, self._deployment = list(blows), deployment
        self._duration_s, self._say = duration_s, say
        self._replaced: set[int] | None = None
        self._next_look_s = 0.0
        self.log: list[dict[str, Any]] = []

    def tick(self, epoch_s: float) -> None:
        """Do what is due in a run that began at `epoch_s`; called all the time."""
        now_s = time.time()
        if self._replaced is not None:
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_PERIOD_S
                self._look()
        elif self._left and now_s - epoch_s >= self._left[0][1] * self._duration_s:
            kind, _ = self._left.pop(0)
            when = {"epoch_s": now_s, "at_s": round(now_s - epoch_s, 3)}
            self.log.append(when | {"kind": kind})
            self._redeploy() if kind == "redeploy" else self._kill(kind)

    def end(self) -> None:
        """Put what the run left undone into the log."""
        if self._replaced is not None:
            after = self._replicas()
            self._note(f"replicas {self._replaced} are not replaced, there are {after}")
        for kind, part in self._left:
            self.log.append({"epoch_s": None, "at_s": None, "kind": kind})
            due_s = part * self._duration_s
            self._note(
                f"at {due_s:.0f} s the run was over, or what came before was not"
            )

    def _note(self, what: str, *, done: bool = False) -> None:
        """Say how the latest blow ended."""
        self.log[-1] |= {"what": what, "done": done}
        self._say(f"chaos: {self.log[-1]['kind']}: {what}")

    def _kill(self, kind: str) -> None:
        assert self._deployment.pid is not None  # Else it was refused.
        role = kind.removeprefix("kill-")
        for process in find_victims(self._deployment.pid, role):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                self._note(f"killed the {role} process {process.pid}", done=True)
                return
        self._note("there is no such process")

    def _redeploy(self) -> None:
        assert self._deployment.redeploy is not None  # Else it was refused.
        before = self._replicas()
        try:
            self._deployment.redeploy()
        except LoadTestError as error:
            self._note(str(error))
        else:
            # Serve has only taken the order so far.
            self._replaced = before

    def _look(self) -> None:
        before, after = self._replaced, self._replicas()
        if before and after and not before & after:
            took_s = time.time() - self.log[-1]["epoch_s"]
            what = f"after {took_s:.0f} s replicas {before} were replaced by {after}"
            self._note(what, done=True)
            self._replaced = None

    def _replicas(self) -> set[int]:
        assert self._deployment.pid is not None  # Else it was refused.
        return {one.pid for one in find_victims(self._deployment.pid, "replica")}


def find_victims(pid: int, kind: str) -> list[psutil.Process]:
    """Return the processes of a deployment that a kind of kill may hit."""
    return [one for role, one in find_processes(pid) if role in VICTIMS[kind]]


def log_drops(share: float, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return what came of dropping streams, as a row beside the server's, if any."""
    if not share:
        return []
    count = sum(one.failure == CLIENT_DROPPED for one in outcomes)
    what = f"befell {count} of {len(outcomes)} streams"
    row = {"epoch_s": None, "at_s": None, "kind": "drop", "what": what}
    return [row | {"num_streams": count, "done": count > 0}]
