"""Kills one process after another, each once the fleet is whole again."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import TYPE_CHECKING, Any, Final

import psutil

from loadtest.client.errors import LoadTestError
from loadtest.compare.processes import find_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.compare.deployment import Deployment

ROLES: Final = {"engine": "engine", "replica": "replica", "front": "front"}
"""Whom each kind of kill hits, by the role of its process."""

MAX_RECOVERY_S: Final = 300.0
_LOOK_S: Final = 0.25
_PAUSE_S: Final = (0.2, 2.0)
"""Between recovery and the next kill, drawn evenly: so that kills fall anywhere in
streams."""


class Killer:
    """Goes through kinds of kills in turn.

    Attributes:
        kills: `kind`, `at_s` (monotonic), and `recovered_after_s` until every process
            of the kind was there again and replicas answered.
    """

    def __init__(
        self,
        deployment: Deployment,
        kinds: Sequence[str],
        num_each: int,
        *,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        """Kill nothing yet."""
        self._deployment = deployment
        self._kinds = [*kinds] * num_each
        self._random = random.Random(seed)
        self._say = say
        self._num_whole = self._count()
        self.kills: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Kill until all is done.

        Raises:
            LoadTestError: Something did not come back.
        """
        for turn, kind in zip(itertools.count(1), self._kinds, strict=False):
            await asyncio.sleep(self._random.uniform(*_PAUSE_S))
            victim = self._random.choice(self._find(kind))
            at_s = time.monotonic()
            victim.kill()
            await self._recover(kind, at_s)
            after_s = round(time.monotonic() - at_s, 1)
            self.kills.append(
                {"kind": kind, "at_s": at_s, "recovered_after_s": after_s}
            )
            self._say(
                f"kill {turn}/{len(self._kinds)}: {kind}, whole after {after_s} s"
            )

    def _find(self, kind: str) -> list[psutil.Process]:
        assert self._deployment.pid is not None
        found = find_processes(self._deployment.pid)
        return [process for role, process in found if role == ROLES[kind]]

    def _count(self) -> dict[str, int]:
        return {kind: len(self._find(kind)) for kind in ROLES}

    async def _recover(self, kind: str, at_s: float) -> None:
        while time.monotonic() - at_s < MAX_RECOVERY_S:
            await asyncio.sleep(_LOOK_S)
            # In threads: looking through processes takes a while, and clients stream.
            counts = await asyncio.to_thread(self._count)
            if counts == self._num_whole and await asyncio.to_thread(self._answers):
                return
        raise LoadTestError(
            f"after {MAX_RECOVERY_S:.0f} s the {kind} that was killed is not back; see "
            "the server's log"
        )

    def _answers(self) -> bool:
        text = self._deployment.endpoint.fetch("/health")
        return text is not None and (
            f'"running_replicas":{self._num_whole["replica"]}' in text.replace(" ", "")
        )
