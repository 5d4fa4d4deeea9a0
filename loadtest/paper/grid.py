"""What is compared: the arms of the paper, and ours."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.bench_command import load_presets

PRESETS = load_presets(Path(__file__).with_name("grid.yaml"))

TURN_ON_BATCH_SIZE = 2
"""As the reference implementation runs it."""


class Arm(NamedTuple):
    """A method with its numbers: its name in tables, and the section `policy`."""

    name: str
    policy: dict[str, Any]


def make_arms(grid: Mapping[str, Any]) -> list[Arm]:
    """Return the arms of a grid, in the order of the tables.

    k drafts, and E beyond them.
    """
    lengths, extras = grid["draft_tokens"], grid["extra"]
    most = max(lengths)
    ours = {"name": "goodput", "max_draft_tokens": most}
    return [
        Arm("none", {"name": "none"}),
        *(Arm(f"SD k={k}", {"name": "fixed", "draft_tokens": k}) for k in lengths),
        Arm(f"DSD k<={most}", {"name": "dynamic", "max_draft_tokens": most}),
        *(
            Arm(f"TETRIS k={k} E={extra}", _select(k, extra, draft_tokens=k))
            for k, extra in itertools.product(lengths, extras)
        ),
        *(
            Arm(f"DSD+TETRIS k<={most} E={extra}", _select(most, extra))
            for extra in extras
        ),
        Arm(f"ours k<={most}", ours),
    ]


def _select(most: int, extra: int, **length: int) -> dict[str, Any]:
    """Return a policy with TETRIS's selection; without a length DSD chooses it."""
    own = {"extra": extra, "turn_on_batch_size": TURN_ON_BATCH_SIZE, **length}
    name = "policies.paper:PaperPlanner"
    return {"name": name, "max_draft_tokens": most + extra, "params": own}
