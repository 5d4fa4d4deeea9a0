"""What clients do to their own streams, to see what that does to the server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .outcome import Outcome

_FORM = re.compile(
    r"(?P<kind>stall|drop)@(?P<part>[\d.]+)(?:x(?P<count>\d+))?(?:=(?P<stall>[\d.]+))?"
)
_DEFAULT_STALL_S = 5.0


@dataclass(frozen=True, slots=True)
class ClientAction:
    """What befalls the next few requests from some moment on.

    Attributes:
        kind: `stall` stops reading after the first tokens, `drop` closes.
        part: When, as a part of the run.
        count: How many requests, in each process of the client.
        stall_s: How long a stall lasts.
    """

    kind: str
    part: float
    count: int
    stall_s: float


def parse_client_actions(text: str) -> tuple[ClientAction, ...]:
    """Read e.g. `stall@0.4x3=5,drop@0.6x2`; empty for none.

    Raises:
        ValueError: If it is something else.
    """
    return tuple(_parse(part) for part in text.split(",") if part.strip())


def _parse(text: str) -> ClientAction:
    match = _FORM.fullmatch(text.strip())
    if match is None or not 0 <= float(match["part"]) < 1:
        raise ValueError(
            f"{text!r} is no client action; write stall@PARTxCOUNT=SECONDS or "
            "drop@PARTxCOUNT with a part of the run below 1, e.g. stall@0.4x3=5"
        )
    return ClientAction(
        match["kind"],
        float(match["part"]),
        int(match["count"] or 1),
        float(match["stall"] or _DEFAULT_STALL_S),
    )


class ActionQueue:
    """Hands out actions to requests."""

    def __init__(self, actions: tuple[ClientAction, ...]) -> None:
        """Begin with all of them due."""
        self._left = {action: action.count for action in actions}

    def next(self, part: float) -> ClientAction | None:
        """Return the action that a request sent at a part of the run is chosen for."""
        for action, left in self._left.items():
            if left and part >= action.part:
                self._left[action] = left - 1
                return action
        return None

    def give_back(self, action: ClientAction) -> None:
        """Have another request take what the one chosen for it failed before."""
        self._left[action] += 1


def log_client_actions(
    text: str, outcomes: Sequence[Outcome], duration_s: float, num_processes: int
) -> list[dict[str, Any]]:
    """Return what came of each action, as rows beside those of the server's chaos.

    Args:
        text: As `parse_client_actions` reads it.
        outcomes: Of the whole run.
        duration_s: Of sending; actions are due at parts of it.
        num_processes: Of the client; every one carries out all actions.

    Returns:
        Rows with `epoch_s` (None: there is no single moment), `at_s`, `kind`, `what`,
        `num_streams` that it befell, and `done`, whether it befell any.
    """
    left = sorted((o for o in outcomes if o.chaos), key=lambda one: one.sent_s)
    rows = []
    for action in sorted(parse_client_actions(text), key=lambda one: one.part):
        due_s, count = action.part * duration_s, action.count * num_processes
        own = [o for o in left if o.chaos == action.kind and o.sent_s >= due_s][:count]
        left = [outcome for outcome in left if outcome not in own]
        rows.append(
            {
                "epoch_s": None,
                "at_s": round(due_s, 3),
                "kind": action.kind,
                "what": f"befell {len(own)} of {count} streams",
                "num_streams": len(own),
                "done": bool(own),
            }
        )
    return rows
