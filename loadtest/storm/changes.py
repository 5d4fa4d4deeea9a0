"""What operators do to a fleet while streams run; no client may notice."""

import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from loadtest.compare.processes import find_victims
from loadtest.errors import LoadTestError

from .hosts import FAR_IP, Hosts, find_program

REDEPLOY, DRAIN, SCALE = "redeploy", "drain", "scale"
CHANGES: Final = (REDEPLOY, DRAIN, SCALE)

_LIMIT_S: Final = 600.0
_DRAIN_S: Final = 150
"""What a host has left that is to go: with no room elsewhere Serve lets what runs there
run as long as it can."""

_LOOK_S: Final = 0.5


@dataclass
class Changer:
    """Changes a fleet over two hosts.

    Attributes:
        pid: All of it descends from this process.
    """

    hosts: Hosts
    pid: int
    _seats: Iterator[int] = field(default_factory=lambda: itertools.cycle((12, 16)))

    def change(self, kind: str) -> None:
        """Do one of `CHANGES`; what has gone is gone then, the rest may still come.

        A redeployment has a setting that takes new engines. A host is drained, goes
        and comes back. A fleet loses one of its replicas and gets it back.

        Raises:
            LoadTestError: It fails, or takes too long.
        """
        if kind == REDEPLOY:
            old = set(self._engines())
            self.hosts.changed = [f"engine.max_num_seqs={next(self._seats)}"]
            self.hosts.deploy()
            _wait_until(lambda: not old.intersection(self._engines()), kind)
        elif kind == DRAIN:
            self._run(
                *("tetris-serve", "drain-node", "--deadline", str(_DRAIN_S)),
                *("--node-id", self._find_far_node()),
            )
            self.hosts.start_far()
        else:
            fewer = self.hosts.num_engines - 1
            self.hosts.num_engines = fewer
            self.hosts.deploy()
            _wait_until(lambda: len(self._engines()) == fewer, kind)
            self.hosts.num_engines = fewer + 1
            self.hosts.deploy()

    def _engines(self) -> list[object]:
        return [*find_victims(self.pid, "engine")]

    def _find_far_node(self) -> str:
        told = self._run(
            *("ray", "list", "nodes", "--format=json", "--filter", "state=ALIVE"),
            *("--filter", f"node_ip={FAR_IP}"),
        )
        # Warnings may come before it.
        (node,) = json.loads(told[told.index("[") :])
        return str(node["node_id"])

    def _run(self, program: str, *words: str) -> str:
        done = subprocess.run(
            [find_program(program), *words],
            capture_output=True,
            text=True,
            env=self.hosts.env(),
            timeout=_LIMIT_S,
        )
        if done.returncode:
            raise LoadTestError(f"{program} {words[0]}: {done.stderr or done.stdout}")
        return done.stdout


def _wait_until(is_done: Callable[[], bool], kind: str) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise LoadTestError(f"{kind}: what was to go runs after {_LIMIT_S:.0f} s")
        time.sleep(_LOOK_S)
