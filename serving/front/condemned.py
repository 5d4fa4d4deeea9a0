"""Requests that kill engines, and are refused for a while."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from serving.front.in_flight import InFlight

CONDEMNED_S: Final = 600.0
"""How long a request that killed its engine alone is refused."""

CONDEMNED: Final = (
    "Engines that ran this request died of it, the last one while it ran alone; it is "
    "refused for ten minutes."
)
"""What its client is told."""


class Condemned:
    """Remembers them by what an engine sees of them."""

    def __init__(self) -> None:
        """Suspect nothing."""
        self._until_s: dict[bytes, float] = {}

    def add(self, one: InFlight) -> None:
        """Refuse a request, and others like it, from now on."""
        self._until_s[one.digest()] = time.monotonic() + CONDEMNED_S

    def holds(self, one: InFlight) -> bool:
        """Whether a request is refused."""
        if not self._until_s:
            return False
        now_s = time.monotonic()
        self._until_s = {d: t for d, t in self._until_s.items() if t > now_s}
        return bool(self._until_s) and one.digest() in self._until_s
