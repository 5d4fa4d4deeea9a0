"""Takes over settings that may change while a replica or a front runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray.serve import metrics

from serving.settings.live import read_live

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from serving.settings.live import LiveSettings

logger = logging.getLogger("ray.serve")


async def take_over(
    user_config: Any, take: Callable[[LiveSettings], Awaitable[None]]
) -> None:
    """Hand on what Serve's `reconfigure` brings, if it makes sense.

    To Serve an exception is a replica that does not start: it would be replaced, and
    the next one too. So a mistake is logged and counted, and all goes on as before.

    Args:
        user_config: Of the deployment.
        take: Takes the settings over; a ValueError refuses them.
    """
    try:
        await take(read_live(user_config))
    except ValueError as error:
        logger.error("Settings are kept as they are: %s", error)
        metrics.Counter(
            "tetris_reload_failures_total",
            "Changes of user_config that could not be taken over.",
        ).inc(1)
