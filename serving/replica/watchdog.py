"""An engine that neither works nor dies is found, and ended."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("ray.serve")

LOOK_S: Final = 5.0

MAX_STEP_S: Final = 120.0
"""Longer than any step takes, compilation included. Between two steps an engine core
answers whoever asks."""


async def wait_until_hung(
    ask: Callable[[], Awaitable[Any]],
    max_step_s: float = MAX_STEP_S,
    look_s: float = LOOK_S,
) -> None:
    """Return once the engine has not answered for too long.

    Args:
        ask: Asks the engine core something, which it answers between two steps.
        max_step_s: Longest time for an answer.
        look_s: Time between two questions.
    """
    while True:
        await asyncio.sleep(look_s)
        try:
            async with asyncio.timeout(max_step_s):
                await ask()
        except TimeoutError:
            logger.error("The engine has not answered for %g s", max_step_s)
            return
        except Exception as error:
            # A dead engine is somebody else's business.
            logger.debug("The engine did not answer: %r", error)
