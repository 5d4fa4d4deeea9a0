"""What clients do to their own streams, to see what that does to the server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loadtest.client.streaming import Misbehaviour

_FORM = re.compile(
    r"(?P<kind>stall|drop)@(?P<part>[\d.]+)(?:x(?P<count>\d+))?(?:=(?P<stall>[\d.]+))?"
)
_DEFAULT_STALL_S = 5.0


@dataclass(frozen=True, slots=True)
class ClientAction:
    """What befalls the next few requests from some moment on.

    Attributes:
        misbehaviour: `stall` stops reading after the first tokens, `drop` closes.
        part: When, as a part of the run.
        count: How many requests, in each process of the client.
    """

    misbehaviour: Misbehaviour
    part: float
    count: int


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
    is_drop = match["kind"] == "drop"
    stall_s = 0.0 if is_drop else float(match["stall"] or _DEFAULT_STALL_S)
    misbehaviour = Misbehaviour(match["kind"], stall_s, is_drop)
    return ClientAction(misbehaviour, float(match["part"]), int(match["count"] or 1))


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
