"""Whose request this is, carried past vLLM to where it is admitted."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Caller:
    """A key as the handlers need it.

    Attributes:
        name: The key's.
        request_class: Of its requests; None for the default.
        charge: Told the tokens of each request when it ends.
        note_fronts: Told how many fronts share the limits.
    """

    name: str
    request_class: str | None
    charge: Callable[[int], None]
    note_fronts: Callable[[int], None]


# What handles a request runs in tasks with copies of its context.
caller: Final[contextvars.ContextVar[Caller | None]] = contextvars.ContextVar(
    "caller", default=None
)
