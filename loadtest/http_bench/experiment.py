"""What an experiment consists of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import loadtest

from .arms import Arm
from .chaos import ServerAction
from .deployment import find_config
from .load import Load
from .shapes import Constant
from .summary import Limits, Targets

_REPO = Path(loadtest.__file__).resolve().parents[1]
_MEASURING = (
    *("chat_stream.py", "client_health.py", "load.py", "locust_run.py"),
    *("locustfile.py", "outcome.py", "session.py", "shapes.py", "sse.py"),
    *("streaming.py", "summary.py", "workloads.py"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions under which every arm is measured."""

    workload: str
    load: Load

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.workload} {self.load.name}"

    @property
    def level(self) -> float | None:
        """The level of a constant load; None where it changes."""
        shape = self.load.shape
        return shape.value if isinstance(shape, Constant) else None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent in every run, besides workload and load.

    Attributes:
        model: Name to ask for; empty for the first one listed.
        max_tokens: Longest reply.
        temperature: Of sampling.
        seed: With the round, of prompts and arrivals.
        duration_s: Time in which requests are sent.
        num_requests: Or as many requests, in closed loop; 0 for none.
        lead_in_s: Begin of every run that is left out.
        drain_s: Time that running requests get to finish.
        extra_body: More fields of every request, as JSON.
        header: One more header, `NAME: VALUE`; empty for none. Never written down.
        max_prompt_chars: Leaves out longer conversations of a file; 0 for any.
        processes: Of the client.
        nice: Priority of the client's processes; None leaves it.
    """

    model: str
    max_tokens: int
    temperature: float
    seed: int
    duration_s: float
    num_requests: int
    lead_in_s: float
    drain_s: float
    extra_body: str
    header: str
    max_prompt_chars: int
    processes: int
    nice: int | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that one command measures.

    Attributes:
        arms: What is compared, in the order of the tables.
        cells: Under which conditions.
        rounds: How often.
        traffic: What is sent.
        warm_up_s: Load that is thrown away, after every start of an arm.
        targets: For goodput.
        limits: For the client.
        config: Deployment file of the arms that we serve.
        settings: Settings of theirs that differ from the file.
        server_chaos: What befalls the server in every run.
        client_chaos: What clients do to their own streams.
        redeploy_command: For chaos.
        is_soak: Whether the server's processes are watched for growth.
    """

    arms: Sequence[Arm]
    cells: Sequence[Cell]
    rounds: int
    traffic: Traffic
    warm_up_s: float
    targets: Targets
    limits: Limits
    config: str
    settings: Sequence[str]
    server_chaos: Sequence[ServerAction]
    client_chaos: str
    redeploy_command: str | None
    is_soak: bool

    def conditions(self) -> dict[str, Any]:
        """Return everything that must be equal for results to belong together.

        Rounds are not among it: more of them may be added.
        """
        return {
            "arms": [asdict(arm) for arm in self.arms],
            **asdict(self.traffic),
            "header": self.traffic.header.partition(":")[0],
            "warm_up_s": self.warm_up_s,
            "targets": asdict(self.targets),
            "limits": asdict(self.limits),
            "config": self.config,
            "config_digest": _digest([find_config(self.config)]),
            "files": _digest(cell.workload for cell in self.cells),
            "set": list(self.settings),
            "server_chaos": [asdict(action) for action in self.server_chaos],
            "client_chaos": self.client_chaos,
            "redeploy_command": self.redeploy_command,
            "is_soak": self.is_soak,
            "client": _digest(Path(__file__).with_name(name) for name in _MEASURING),
            "server": _digest(
                file
                for package in ("policies", "serving")
                for file in sorted((_REPO / package).rglob("*.py"))
            ),
        }


def _digest(files: Iterable[str | Path]) -> str:
    """Return a short digest of files, of those that are there."""
    digest = hashlib.sha256()
    for file in map(Path, files):
        digest.update(file.name.encode() + b"\0")
        if file.is_file():
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
