"""Rounds of schemathesis against a server, until there were cases enough.

Each has a seed of its own, so that any can be run again by itself.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from loadtest.compare.processes import sample
from tests.conftest import run
from tests.serving.conftest import BIN, MODEL, ROOT, Server, wait_until
from tests.serving.fuzz.hooks import COUNTS_FILE, EVERY

CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
PHASES: Final = ("coverage", "fuzzing", "stateful")
"""What runs at the same time. The first is made of the schema alone, and only once."""

FEW: Final = 100
MANY: Final = 1000
"""Cases for each route: of the first round, which has some 3,000 of that phase besides,
and at most of each later one."""

NUM_ROUTES: Final = 5
"""That take anything; the others have a case or two."""

ROUND_TIMEOUT_S: Final = 900.0
ROLES: Final = ("front", "replica", "engine", "proxy")

GOOD: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "one two", "max_tokens": 8},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 8,
        "logprobs": True,
    },
}


def fuzz(
    server: Server,
    num_cases: int,
    seed: int,
    folder: Path,
    every: int = 1,
    few: int = FEW,
) -> dict[str, Any]:
    """Send a server at least so many cases, and see that it is as it was before.

    Args:
        server: The server, started here: its processes are looked at.
        num_cases: At least, in whole rounds, of which there are two at least.
        seed: Of the first round; each later one has the next.
        folder: For what schemathesis leaves behind, failing cases among it.
        every: Of the cases that are made of the schema alone, one in so many is sent.
        few: Cases for each route of the first round, and fewest of each later one.

    Returns:
        What was done: rounds, with the seed and the most cases of a route in each;
        answers by route and status; and the memory of each role before, after
        the first round and at the end.

    Raises:
        AssertionError: A fault, a hang, a wrong answer afterwards, a seat kept.
    """
    start_s, expected = time.monotonic(), _ask(server)
    memory = {"before": _memory(server)}
    statuses: Counter[str] = Counter()
    rounds = []
    # Two at least, for memory grows in the first one as it may.
    while (num_missing := num_cases - statuses.total()) > 0 or len(rounds) < 2:
        round_seed, phases, most = seed + len(rounds), PHASES, few
        if rounds:
            phases = PHASES[1:]
            most = min(MANY, max(few, num_missing // NUM_ROUTES))
        with ThreadPoolExecutor(len(phases)) as clients:
            run_phase = functools.partial(
                _run_phase, server, round_seed, most, folder, every
            )
            found = sum(clients.map(run_phase, phases), Counter())
        statuses += found
        rounds.append({"seed": round_seed, "most": most, "cases": found.total()})
        memory.setdefault("after the first round", _memory(server))
    wait_until(lambda: not _num_unfinished(server), 60)
    assert _ask(server) == expected
    return {
        "cases": statuses.total(),
        "rounds": rounds,
        "seconds": round(time.monotonic() - start_s),
        "statuses": dict(sorted(statuses.items())),
        "memory_mib": memory | {"after": _memory(server)},
    }


def _run_phase(
    server: Server, seed: int, most: int, folder: Path, every: int, phase: str
) -> Counter[str]:
    counts_file = folder / f"{seed}-{phase}.json"
    env = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.serving.fuzz.hooks"}
    env |= {"PYTHONPATH": str(ROOT), COUNTS_FILE: str(counts_file)}
    if phase == PHASES[0]:
        env[EVERY] = str(every)
    command = [BIN / "schemathesis", "--config-file", CONFIG, "--no-color", "run"]
    command += [f"{server.url}/openapi.json", "--phases", phase]
    command += ["--max-examples", str(most), "--seed", str(seed)]
    limits = {"timeout": ROUND_TIMEOUT_S, "stdin": subprocess.DEVNULL}
    run(*command, cwd=folder, env=env, **limits)
    return Counter(json.loads(counts_file.read_text("utf-8")))


def _ask(server: Server) -> list[Any]:
    """Return what is said to requests that have one right answer."""
    answers = []
    for path, body in GOOD.items():
        answer = server.post(path, json=body | {"model": MODEL, "temperature": 0})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        answers.append(choice.get("text") or choice["message"]["content"])
    return answers


def _num_unfinished(server: Server) -> float:
    names = ("ray_vllm_num_requests_running", "ray_tetris_waiting_requests")
    return sum(server.total(name) for name in names)


def _memory(server: Server) -> dict[str, float]:
    """Return the private memory of a process of each role, MiB, the mean of several."""
    rows = {row["role"]: row for row in sample(server.command.process.pid)}
    return {
        role: round(rows[role]["memory_mib"] / rows[role]["num_processes"], 1)
        for role in ROLES
    }
