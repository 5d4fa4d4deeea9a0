"""What is compared, and where: the arms of the paper, ours, and batch caps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("grid.yaml").read_text()
)

TURN_ON_BATCH_SIZE = 2
"""As the reference implementation runs it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with its numbers.

    Attributes:
        name: As in tables.
        method: `none`, `sd`, `dsd`, `tetris`, `dsd+tetris` or `ours`.
        draft_tokens: k, or the longest where the method chooses; 0 for `none`.
        extra: E, drafted beyond it.
    """

    name: str
    method: str
    draft_tokens: int = 0
    extra: int = 0

    def policy(self) -> dict[str, Any]:
        """Return the section `policy` of a deployment."""
        k, most = self.draft_tokens, self.draft_tokens + self.extra
        if self.method == "none":
            return {"name": "none"}
        if self.method == "sd":
            return {"name": "fixed", "draft_tokens": k}
        if self.method in ("dsd", "ours"):
            name = "dynamic" if self.method == "dsd" else "goodput"
            return {"name": name, "max_draft_tokens": k}
        params = {"extra": self.extra, "turn_on_batch_size": TURN_ON_BATCH_SIZE}
        if self.method == "tetris":
            params["draft_tokens"] = k
        name = "policies.paper:PaperPlanner"
        return {"name": name, "max_draft_tokens": most, "params": params}


@dataclass(frozen=True, slots=True)
class Task:
    """One run of one arm: an engine that starts, answers all requests, and ends."""

    run: int
    dataset: str
    cap: int
    arm: Arm

    @property
    def key(self) -> tuple[int, str, int, str]:
        """What it is found again by."""
        return self.run, self.dataset, self.cap, self.arm.name


def make_arms(grid: Mapping[str, Any]) -> list[Arm]:
    """Return the arms of a grid, in the order of the tables."""
    lengths, extras = grid["draft_tokens"], grid["extra"]
    longest = max(lengths)
    arms = [Arm("none", "none")]
    arms += [Arm(f"SD k={k}", "sd", k) for k in lengths]
    arms += [Arm(f"DSD k<={longest}", "dsd", longest)]
    arms += [
        Arm(f"TETRIS k={k} E={extra}", "tetris", k, extra)
        for k, extra in itertools.product(lengths, extras)
    ]
    arms += [
        Arm(f"DSD+TETRIS k<={longest} E={extra}", "dsd+tetris", longest, extra)
        for extra in extras
    ]
    return [*arms, Arm(f"ours k<={longest}", "ours", longest)]


def make_tasks(
    grid: Mapping[str, Any], datasets: Sequence[str], wanted: Sequence[str] = ("*",)
) -> Iterator[Task]:
    """Yield all runs; the next one of all arms begins when the one before is whole.

    Arms take turns, begun by another one in each run: what drifts falls on all alike.

    Args:
        grid: A preset.
        datasets: By name.
        wanted: Patterns of arms' names, of which one must match.
    """
    arms = [
        arm
        for arm in make_arms(grid)
        if any(fnmatchcase(arm.name, pattern) for pattern in wanted)
    ]
    for run in range(1, grid["runs"] + 1):
        start = (run - 1) * len(arms) // grid["runs"]
        for dataset, cap in itertools.product(datasets, grid["caps"]):
            for arm in arms[start:] + arms[:start]:
                yield Task(run, dataset, cap, arm)
