"""Which engine replicas run, as the router of this process was told last.

A module of its own, for Serve pickles the module of a router's class by value: what the
router keeps in its own module, nobody else sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_running_ids: frozenset[str] | None = None


def note_running(ids: Iterable[str]) -> None:
    """Remember Serve's names of the replicas that run."""
    global _running_ids
    _running_ids = frozenset(ids)


def running_ids() -> frozenset[str] | None:
    """Return Serve's names of them; None before it has told any."""
    return _running_ids
