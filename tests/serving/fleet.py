"""Streams over a deployment of two fronts and two replicas, and its processes."""

import asyncio
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from loadtest.compare.processes import find_processes
from loadtest.storm.cases import FEATURES, PLAIN, Case
from loadtest.storm.streams import Stream, run_streams
from tests.serving.conftest import MODEL, START_TIMEOUT_S, Server, wait_until

Streams = list[Stream]
# Chats, and what is drawn by chance, are left to `loadtest.storm`.
KINDS = [PLAIN, *(one for one in FEATURES if one not in ("tools", "two answers"))]
CASES = [Case(kind, number) for number, kind in enumerate(KINDS * 2)]

_warm: set[psutil.Process] = set()


def most(begun: Iterable[object]) -> bool:
    """Whether all have but those that may wait for a grammar till others have ended."""
    return sum(map(bool, begun)) >= sum(one.kind != "schema" for one in CASES)


def run_all(
    server: Server,
    disturb: Callable[[], object] | None = None,
    once: Callable[[Iterable[object]], bool] = most,
) -> Streams:
    """Run two streams of each kind at once, and disturb them once most have begun.

    Or once `any` has.
    """
    streams: Streams = []

    def have_begun() -> bool:
        return len(streams) == len(CASES) and once(one.token_ids for one in streams)

    asking = run_streams(server.url, MODEL, CASES, len(CASES), streams)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, asking)
        if disturb is not None:
            wait_until(have_begun, 60, period_s=0.01)
            disturb()
        return running.result(300)


def processes(server: Server, role: str) -> list[psutil.Process]:
    family = find_processes(server.command.process.pid)
    return [process for found, process in family if found == role]


def wait_for_both_fronts(server: Server) -> None:
    """Wait until Serve counts on both: a front's process is there long before."""
    place = re.search(
        r"^  dashboard +(\S+) +token in (\S+)$", server.command.output, re.MULTILINE
    )
    assert place is not None
    headers = {"Authorization": f"Bearer {Path(place[2]).read_text().strip()}"}
    url = f"{place[1]}/api/serve/applications/"

    def both_run() -> bool:
        found = httpx.get(url, headers=headers, timeout=60, trust_env=False).json()
        (application,) = found["applications"].values()
        fronts = application["deployments"]["TetrisFront"]["replicas"]
        return [one["state"] for one in fronts] == ["RUNNING"] * 2

    wait_until(both_run, START_TIMEOUT_S)


def when_both_are_ready(server: Server) -> list[psutil.Process]:
    """Wait for both replicas, warm up those that are new, and return their engines.

    Else streams end on the one that is to be killed before they begin on the other.
    """

    def ready() -> list[psutil.Process]:
        engines = processes(server, "engine")
        return engines if len(engines) == server.num_replicas() == 2 else []

    engines = wait_until(ready, START_TIMEOUT_S)
    if not _warm.issuperset(engines):
        run_all(server)
        _warm.update(engines)
    return engines


def check_equal(streams: Streams, undisturbed: Streams) -> None:
    assert [one.error for one in streams] == [None] * len(streams)
    for seen, expected in zip(streams, undisturbed, strict=True):
        assert seen.differs_from(expected) is None, seen.case
        assert seen.num_tokens == sum(map(len, expected.token_ids.values())), seen.case
