"""When a refused client should come back, carried past vLLM to the HTTP answer.

vLLM turns what a front raises below it into text of its own, without room for more.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from typing import TYPE_CHECKING, Final

from serving.front.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RETRY_AFTER_S: Final = 600

# A list, for what handles a request runs in tasks with copies of its context.
_retry_after_s: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar(
    "retry_after_s", default=None
)


def note_retry_after(seconds: float) -> None:
    """Note when the present request is worth another try."""
    noted = _retry_after_s.get()
    if noted is not None:
        noted.append(min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds))))


@contextlib.contextmanager
def retry_after_as_noted() -> Iterator[None]:
    """Let a refusal that is raised here say when to come back, if that was noted."""
    noted: list[int] = []
    _retry_after_s.set(noted)
    try:
        yield
    except ApiError as error:
        if noted:
            error.retry_after_s = max(noted)
        raise
