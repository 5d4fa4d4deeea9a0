"""How many engine replicas run, as Ray Serve's controller last said."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from serving.front.errors import ApiError

logger = logging.getLogger("ray.serve")

_PERIOD_S: Final = 1.0
"""A count as young as that is taken for the present one."""

_WAIT_S: Final = 2.0
"""Longest wait for the controller; replicas serve on without it."""


class ReplicaCount:
    """The newest count there is, and its age.

    Attributes:
        num_running: Running replicas when they were last counted; None before.
    """

    def __init__(
        self,
        count: Callable[[], int],
        *,
        may_be_none: Callable[[], bool] = lambda: False,
    ) -> None:
        """Know nothing yet.

        Args:
            count: Asks the controller, in a thread; may block while that is away.
            may_be_none: Whether an idle deployment has none, and the next request
                starts one.
        """
        self._count = count
        self._may_be_none = may_be_none
        self._look: asyncio.Task[None] | None = None
        self._looked_s = self._counted_s = -_PERIOD_S
        self.num_running: int | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the count was true; 0 while it is taken for the present one."""
        age_s = time.monotonic() - self._counted_s
        return age_s if age_s > _PERIOD_S else 0.0

    async def refresh(self) -> None:
        """Count again unless that was just done; gives up soon and never fails."""
        if self._look is None and time.monotonic() - self._looked_s >= _PERIOD_S:
            self._look = asyncio.create_task(self._take())
        if self._look is not None:
            await asyncio.wait({self._look}, timeout=_WAIT_S)

    async def describe(self) -> dict[str, Any]:
        """Return what `/health` answers while a replica runs.

        Serve's controller may be away; replicas serve on without it. Then the answer
        is the last one known, and says how old it is.

        Raises:
            ApiError: 503, no replica runs where one should, or none is known to.
        """
        await self.refresh()
        count, age_s = self.num_running, self.age_s
        if count is None:
            raise ApiError(503, "Ray Serve does not tell what is running; retry.")
        if not count and self._may_be_none():
            return {"status": "idle", "running_replicas": 0}
        if not count:
            when = f"was running {age_s:.0f} s ago" if age_s else "is running"
            raise ApiError(503, f"No engine replica {when}; retry.")
        if age_s:
            return {
                "status": "stale",
                "running_replicas": count,
                "age_s": round(age_s, 1),
            }
        return {"status": "ok", "running_replicas": count}

    async def _take(self) -> None:
        self._looked_s = time.monotonic()
        try:
            self.num_running = await asyncio.to_thread(self._count)
            self._counted_s = time.monotonic()
        except Exception:
            logger.warning("Ray Serve's controller tells no states", exc_info=True)
        finally:
            self._look = None
