"""Ray Serve's log file of a replica, kept open while vLLM sets up its own logging."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING

from serving.compat_ray import SERVE_LOGGER_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def keep_serve_log() -> Iterator[None]:
    """Let the replica's log survive a `logging.config.dictConfig` in this process.

    vLLM calls it when an engine starts, and it closes every handler there is. A closed
    file opens again at the next line, but the buffer in front of it has lost its
    target for good, and with it every later line of the replica.
    """
    targets = [
        (handler, handler.target)
        for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers
        if isinstance(handler, MemoryHandler)
    ]
    try:
        yield
    finally:
        for handler, target in targets:
            handler.setTarget(target)
