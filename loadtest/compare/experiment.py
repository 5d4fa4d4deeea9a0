"""What an experiment consists of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.engine_bench.models import count_parameters, digest_model
from loadtest.load.arrivals import Load
from loadtest.load.options import LoadOptions
from loadtest.report.summary import Limits, Targets

from .arms import Arm
from .chaos import ServerAction
from .deployment import REPO, find_config

_SENT = {
    **{name: name for name in ("model", "max_tokens", "temperature", "seed")},
    **{name: name for name in ("extra_body", "max_prompt_chars", "client_chaos")},
    "duration": "duration_s",
    "requests": "num_requests",
    "drain": "drain_s",
}
"""Options of a run that all runs have in common, and their names in results."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions under which every arm is measured."""

    workload: str
    load: Load

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.workload} {self.load.name}"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that one command measures.

    Attributes:
        arms: What is compared, in the order of the tables.
        cells: Under which conditions.
        rounds: How often.
        options: What is sent in every run, but for host, workload, load and seed.
        lead_in_s: Begin of every run that is left out.
        warm_up_s: Load that is thrown away, after every start of an arm.
        processes: Of the client.
        nice: Priority of the client's processes; None leaves it.
        targets: For goodput.
        limits: For the client.
        config: Deployment file of the arms that we serve.
        settings: Settings of theirs that differ from the file.
        server_chaos: What befalls the server in every run.
        redeploy_command: For chaos.
        is_soak: Whether the server's processes are watched for growth.
    """

    arms: Sequence[Arm]
    cells: Sequence[Cell]
    rounds: int
    options: LoadOptions
    lead_in_s: float
    warm_up_s: float
    processes: int
    nice: int | None
    targets: Targets
    limits: Limits
    config: str
    settings: Sequence[str]
    server_chaos: Sequence[ServerAction]
    redeploy_command: str | None
    is_soak: bool

    def conditions(self) -> dict[str, Any]:
        """Return everything that must be equal for results to belong together.

        Rounds are not among it: more of them may be added.
        """
        own = ("lead_in_s", "warm_up_s", "processes", "nice", "config")
        package = Path(__file__).parents[1]
        measuring = [package / "locustfile.py", package / "report" / "summary.py"]
        for folder in ("client", "load"):
            measuring += sorted((package / folder).glob("*.py"))
        serving = (sorted((REPO / name).rglob("*.py")) for name in _SERVER_PACKAGES)
        return {
            "arms": [asdict(arm) for arm in self.arms],
            **{key: getattr(self.options, name) for name, key in _SENT.items()},
            **{name: getattr(self, name) for name in (*own, "redeploy_command")},
            # What follows the name may be a secret.
            "header": self.options.header.partition(":")[0],
            "targets": asdict(self.targets),
            "limits": asdict(self.limits),
            "config_digest": _digest([find_config(self.config)]),
            "files": _digest(cell.workload for cell in self.cells),
            "set": list(self.settings),
            "server_chaos": [asdict(action) for action in self.server_chaos],
            "is_soak": self.is_soak,
            "client": _digest(measuring),
            "server": _digest(file for files in serving for file in files),
        }

    def describe_models(self) -> dict[str, Any]:
        """Return size and digest of the models that we serve ourselves, by role."""
        file = find_config(self.config)
        if not any(arm.policy for arm in self.arms) or not file.is_file():
            return {}
        names = dict((yaml.safe_load(file.read_text()) or {}).get("model", {}))
        for setting in self.settings:
            name, _, value = setting.partition("=")
            if name.startswith("model."):
                names[name.removeprefix("model.")] = value
        models = {}
        for role in ("target", "draft"):
            path = file.parent / Path(str(names.get(role, ""))).expanduser()
            if names.get(role) and path.is_dir():
                described = {"name": path.name, "digest": digest_model(path)}
                models[role] = described | {"parameters": count_parameters(path)}
        return models


_SERVER_PACKAGES = ("policies", "serving")


def _digest(files: Iterable[str | Path]) -> str:
    """Return a short digest of files, of those that are there."""
    digest = hashlib.sha256()
    for file in map(Path, files):
        digest.update(file.name.encode() + b"\0")
        if file.is_file():
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
