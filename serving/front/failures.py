"""What a client is told whose request was taken, and gets no answer."""

import logging
from typing import Final

logger = logging.getLogger("ray.serve")

FAULT: Final = "The server failed to lease an engine for the request."

EXPIRED: Final = (
    "The deadline passed while the request waited for an engine; retry, or allow it "
    "more than its deadline_ms."
)

INTERRUPTED: Final = "The request was interrupted too often; retry."

REPLACED: Final = (
    "An update replaced the model while the request waited for an engine; retry."
)


def log_unheard(request_id: str, error: Exception) -> None:
    """Log a failure of which nobody has asked to be told."""
    logger.error("Request %s failed: %s", request_id, error)
