"""Kills one process after another, each once the fleet is whole again."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from loadtest.compare.deployment import Deployment
from loadtest.compare.processes import HOST, VICTIMS, find_processes, find_victims
from loadtest.compare.scrape import read_samples
from loadtest.errors import LoadTestError

from .changes import CHANGES, Changer
from .hosts import FIRST, Hosts, set_priority

MAX_RECOVERY_S: Final = 300.0
_LOOK_S: Final = 0.5
_PAUSE_S: Final = (0.2, 2.0)
"""Between recovery and the next kill, drawn evenly: so that kills fall anywhere in
streams."""

_ROLES: Final = frozenset(role for roles in VICTIMS.values() for role in roles)
_LINKS: Final = "tetris_connected_replicas"


@dataclass
class _Fleet:
    """What of a deployment runs, and whether that is all of it.

    Attributes:
        pid: All of it descends from this process.
        killed: What does not count though it may take seconds to end.
    """

    deployment: Deployment
    pid: int
    killed: set[psutil.Process] = field(default_factory=set)
    _links: Mapping[Any, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take what runs now for all of it."""
        self._wanted = self._count()

    def is_whole(self, *, has_new_front: bool) -> bool:
        """Return whether all processes run, and fronts are connected to all replicas.

        A process has its title long before it serves. What a front that was killed has
        last said is shown for a while, so that there has to be one more that speaks.
        """
        num_replicas = self._wanted["replica"]
        if self._count() != self._wanted:
            return False
        if self.deployment.endpoint.count_replicas() != num_replicas:
            return False
        links = self._read_links()
        if has_new_front and links.keys() <= self._links.keys():
            return False
        if [*links.values()] != [num_replicas] * self._wanted["front"]:
            return False
        self._links = links
        return True

    def _count(self) -> Counter[str]:
        found = find_processes(self.pid)
        return Counter(
            role for role, one in found if role in _ROLES and one not in self.killed
        )

    def _read_links(self) -> dict[Any, float]:
        """Return by a front's labels how many replicas it is connected to."""
        pages = map(self.deployment.endpoint.fetch, self.deployment.metrics_urls)
        return {
            tuple(sorted(labels.items())): number
            for page in pages
            for _, labels, number in read_samples(page or "", _LINKS.__eq__)
        }


async def kill_in_turn(
    deployment: Deployment,
    kinds: list[str],
    seed: int,
    say: Callable[[str], None],
    kills: list[dict[str, Any]],
    hosts: Hosts | None = None,
) -> None:
    """Kill one process of each kind, the next when all are back and replicas answer.

    With hosts, the one that has no front may be killed too, and the fleet changed.

    Args:
        deployment: One that we have started.
        kinds: Of `VICTIMS` or, with hosts, `CHANGES`.
        seed: Of victims and moments.
        say: Told of each.
        kills: `kind`, `at_s` (monotonic) and `recovered_after_s` of each are added here
            (None till it is whole again).
        hosts: Where they run, if there is more than one.

    Raises:
        LoadTestError: It is not whole again in time.
    """
    assert deployment.pid is not None  # We have started it.
    draw = random.Random(seed)
    fleet = await asyncio.to_thread(_Fleet, deployment, deployment.pid)
    await _wait_until_whole(fleet, "")
    changer = None if hosts is None else Changer(hosts, fleet.pid)
    for kind in kinds:
        await asyncio.sleep(draw.uniform(*_PAUSE_S))
        kill: dict[str, Any] = {"kind": kind, "recovered_after_s": None}
        session: int | None = None
        if changer is not None and kind in CHANGES:
            kill["at_s"] = time.monotonic()
            kills.append(kill)
            await asyncio.to_thread(changer.change, kind)
        else:
            # In a thread: looking through processes takes a while, and clients stream.
            victims = await asyncio.to_thread(find_victims, fleet.pid, kind)
            if hosts is not None and kind == HOST:
                victims = [*filter(hosts.is_far, victims)]
            victim = draw.choice(victims)
            session = None if hosts is None else os.getsid(victim.pid)
            kill["at_s"] = time.monotonic()
            victim.kill()
            fleet.killed.add(victim)
            kills.append(kill)
            if hosts is not None and kind == HOST:
                session = await asyncio.to_thread(hosts.start_far)
            if session is not None:
                set_priority(session, FIRST)
        await _wait_until_whole(fleet, kind)
        if session is not None:
            set_priority(session, 0)
        after_s = round(time.monotonic() - kill["at_s"], 1)
        kill["recovered_after_s"] = after_s
        say(f"kill {len(kills)}/{len(kinds)}: {kind}, whole after {after_s} s")


async def _wait_until_whole(fleet: _Fleet, killed: str) -> None:
    since_s, is_front = time.monotonic(), killed == "front"
    while not await asyncio.to_thread(fleet.is_whole, has_new_front=is_front):
        if time.monotonic() - since_s > MAX_RECOVERY_S:
            raise LoadTestError(
                f"the fleet is not whole {MAX_RECOVERY_S:.0f} s after this: "
                f"{killed or 'its start'}; see the server's log"
            )
        await asyncio.sleep(_LOOK_S)
