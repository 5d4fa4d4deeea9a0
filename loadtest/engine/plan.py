"""What is measured: cells, named runs, and the conditions all of it has in common."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.arms import Arm

from .arms import parse_bench_arm, policy_of

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("presets.yaml").read_text()
)
DEFAULTS = {
    "rounds": 5,
    "window_s": 30.0,
    "min_requests": 24,
    "max_tokens": 128,
    "target_parameters": 100_000_000,
}
"""Values for what a preset does not say."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions under which every arm is measured."""

    workload: str
    temperature: float
    concurrency: int

    @property
    def name(self) -> str:
        """Short name, also fit for a file."""
        workload = Path(self.workload).stem
        return f"{workload}-t{self.temperature:g}-c{self.concurrency}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "workload": self.workload,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run.

    Attributes:
        arms: In the order of the tables.
        cells: In the order of measurement.
        rounds: Measured rounds, each on engines that start anew.
        window_s: How long each arm is measured at least, in each cell of a round.
        max_tokens: Longest reply.
        engine: The section `engine` of the deployment whose engines are measured.
        target: Directory of the target, padded or not.
        draft: Directory of the draft.
        cpus: Cores of the engines; none on a GPU.
        gpu: Name of the GPU, which one engine at a time holds; None for the CPU's
            engines, which take turns.
        trace: Whether the first block of every cell is recorded step by step.
    """

    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    rounds: int
    window_s: float
    max_tokens: int
    engine: dict[str, Any]
    target: Path
    draft: Path
    cpus: tuple[int, ...]
    gpu: str | None = None
    trace: bool = False

    def deployment(self, arm: Arm) -> dict[str, Any]:
        """Return the settings with which a server would run an arm's engine."""
        model = {"id": "bench", "target": str(self.target.absolute())}
        if arm.policy != "none":
            model["draft"] = str(self.draft.absolute())
        deployment = {
            "model": model,
            "policy": policy_of(arm),
            "engine": self.engine,
        }
        if self.gpu is not None:
            deployment["replicas"] = {"num_gpus": 1}
        return deployment

    def conditions(self) -> dict[str, Any]:
        """Return what results depend on, but for models, code, requests and machine.

        Rounds, cells and tracing are left out: more of them may be added later.
        """
        return {
            "policies": [arm.name for arm in self.arms],
            "window_s": self.window_s,
            "max_tokens": self.max_tokens,
            **self.engine,
            "cpus": list(self.cpus),
            "gpu": self.gpu,
        }


def list_cells(
    blocks: Sequence[dict[str, str]],
    workloads: str | None = None,
    temperatures: str | None = None,
    concurrency: str | None = None,
) -> tuple[Cell, ...]:
    """Return the cells of all blocks, each once.

    Args:
        blocks: Comma-separated axes by name.
        workloads: Takes the place of the blocks' own, as do the other two.
        temperatures: Numbers from 0 up.
        concurrency: Numbers of requests in flight, from 1 up.

    Raises:
        ValueError: If a number is none, or too small.
    """
    cells = (
        Cell(workload, float(temperature), int(in_flight))
        for block in blocks
        for workload in split(workloads or block["workloads"])
        for temperature in split(temperatures or block["temperatures"])
        for in_flight in split(concurrency or block["concurrency"])
    )
    found = tuple(dict.fromkeys(cells))
    if any(cell.temperature < 0 or cell.concurrency < 1 for cell in found):
        raise ValueError("temperatures begin at 0, requests in flight at 1")
    return found


def list_arms(text: str) -> tuple[Arm, ...]:
    """Read comma-separated arms.

    Raises:
        ValueError: If one is none, or named twice.
    """
    arms = tuple(map(parse_bench_arm, split(text)))
    if len(set(arms)) < len(arms):
        raise ValueError(f"{text!r} names a policy twice")
    return arms


def shuffle(arms: Sequence[Arm], key: str) -> list[Arm]:
    """Return the arms in an order that the key decides.

    With other keys every arm comes first and last, and after every other one: what one
    leaves behind, and what drifts, falls on all of them alike.
    """
    order = list(arms)
    random.Random(key).shuffle(order)
    return order


def split(text: str) -> list[str]:
    """Split at commas."""
    return [part.strip() for part in text.split(",")]
