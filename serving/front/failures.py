"""Why a request gets no answer from an engine, and what its client is told then."""

import logging
from typing import Final

logger = logging.getLogger("ray.serve")

DIED, _CLOSED = "engine died", "connection closed"

REASONS: Final = frozenset(
    {DIED, _CLOSED, "gap", "silence", "lease ended", "engine is shut down"}
)
"""Why a request may have to go on elsewhere; "failure" for whatever else."""

FAULT: Final = "The server failed to lease an engine for the request."

EXPIRED: Final = (
    "The deadline passed while the request waited for an engine; retry, or allow it "
    "more than its deadline_ms."
)

INTERRUPTED: Final = "The request was interrupted too often; retry."

REPLACED: Final = (
    "An update replaced the model while the request waited for an engine; retry."
)


def is_death(reason: str, *, is_leaving: bool) -> bool:
    """Return whether an engine may have died of what it ran.

    Args:
        reason: Why it has gone.
        is_leaving: Whether Serve had its replica drain.
    """
    return reason == DIED or (reason == _CLOSED and not is_leaving)


def log_unheard(request_id: str, error: Exception) -> None:
    """Log a failure of which nobody has asked to be told."""
    logger.error("Request %s failed: %s", request_id, error)
