"""What is compared: the arms of the paper, and ours."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.arms import Arm
from loadtest.bench_command import load_presets

PRESETS = load_presets(Path(__file__).with_name("grid.yaml"))

TURN_ON_BATCH_SIZE = 2
"""As the reference implementation runs it."""

ENGINES_AT_ONCE = 10
"""On a CPU; each takes 2 GiB with SmolLM2."""


@dataclass(frozen=True, slots=True)
class Method(Arm):
    """One of the paper's, or ours: its name in tables, and the section `policy`."""

    label: str = field(kw_only=True)
    section: Mapping[str, Any] = field(kw_only=True, compare=False)

    @property
    def name(self) -> str:
        """Return the label."""
        return self.label

    def settings(self) -> dict[str, Any]:
        """Return the section `policy`."""
        return dict(self.section)


def make_arms(grid: Mapping[str, Any]) -> list[Method]:
    """Return the arms of a grid, in the order of the tables.

    k drafts, and E beyond them.
    """
    lengths, extras = grid["draft_tokens"], grid["extra"]
    most = max(lengths)
    return [
        _make("none"),
        *(_make(f"SD k={k}", name="fixed", draft_tokens=k) for k in lengths),
        _select(f"DSD k<={most}", most, 0),
        *(
            _select(f"TETRIS k={k} E={extra}", k, extra, draft_tokens=k)
            for k, extra in itertools.product(lengths, extras)
        ),
        *(_select(f"DSD+TETRIS k<={most} E={extra}", most, extra) for extra in extras),
        _make(f"ours k<={most}", name="goodput", max_draft_tokens=most),
    ]


def is_baseline(name: str) -> bool:
    """Tell whether an arm is one that others are compared with."""
    return name == "none" or name.startswith(("SD ", "DSD "))


def group_arms(arms: Sequence[Method]) -> list[list[Method]]:
    """Put arms into groups of which each has all baselines, and fits this machine."""
    baselines = [arm for arm in arms if is_baseline(arm.name)]
    others = [arm for arm in arms if not is_baseline(arm.name)]
    room = max(1, ENGINES_AT_ONCE - len(baselines))
    count = max(1, -(-len(others) // room))
    return [baselines + others[first::count] for first in range(count)]


def _make(label: str, *, name: str = "none", **more: Any) -> Method:
    return Method(name, label=label, section={"name": name, **more})


def _select(label: str, most: int, extra: int, **length: int) -> Method:
    """Return an arm of the paper's planner; without a length DSD chooses it."""
    params = {"extra": extra, "turn_on_batch_size": TURN_ON_BATCH_SIZE, **length}
    name, depth = "policies.paper:PaperPlanner", most + extra
    return _make(label, name=name, max_draft_tokens=depth, params=params)
