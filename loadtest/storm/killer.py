"""Kills one process after another, each once the fleet is whole again."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Final

from loadtest.client.errors import LoadTestError
from loadtest.compare.deployment import Deployment
from loadtest.compare.processes import HOST, VICTIMS, find_victims

from .hosts import Hosts

MAX_RECOVERY_S: Final = 300.0
_LOOK_S: Final = 0.25
_PAUSE_S: Final = (0.2, 2.0)
"""Between recovery and the next kill, drawn evenly: so that kills fall anywhere in
streams."""


async def kill_in_turn(
    deployment: Deployment,
    kinds: list[str],
    seed: int,
    say: Callable[[str], None],
    hosts: Hosts | None = None,
) -> list[dict[str, Any]]:
    """Kill one process of each kind, the next when all are back and replicas answer.

    With hosts, the one that has no front may be killed too.

    Returns:
        `kind`, `at_s` (monotonic) and `recovered_after_s` of every kill.
    """
    assert deployment.pid is not None  # We have started it.
    pid, draw = deployment.pid, random.Random(seed)

    def count() -> dict[str, int]:
        return {kind: len(find_victims(pid, kind)) for kind in VICTIMS}

    num_whole = count()

    def is_whole() -> bool:
        replicas = deployment.endpoint.count_replicas()
        return count() == num_whole and replicas == num_whole["replica"]

    kills: list[dict[str, Any]] = []
    for kind in kinds:
        await asyncio.sleep(draw.uniform(*_PAUSE_S))
        victims = find_victims(pid, kind)
        if kind == HOST:
            assert hosts is not None  # Asked for with a second host alone.
            victims = [*filter(hosts.is_far, victims)]
        victim = draw.choice(victims)
        at_s = time.monotonic()
        victim.kill()
        if kind == HOST and hosts is not None:
            await asyncio.to_thread(hosts.start_far)
        # In a thread: looking through processes takes a while, and clients stream.
        while not await asyncio.to_thread(is_whole):
            if time.monotonic() - at_s > MAX_RECOVERY_S:
                raise LoadTestError(
                    f"after {MAX_RECOVERY_S:.0f} s the {kind} that was killed is not "
                    "back; see the server's log"
                )
            await asyncio.sleep(_LOOK_S)
        after_s = round(time.monotonic() - at_s, 1)
        kills.append({"kind": kind, "at_s": at_s, "recovered_after_s": after_s})
        say(f"kill {len(kills)}/{len(kinds)}: {kind}, whole after {after_s} s")
    return kills
