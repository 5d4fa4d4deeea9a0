"""What Ray's GCS keeps in a Redis, so that another one can go on where it was."""

import contextlib
import os
import secrets
from typing import Final

from serving.settings.model import RedisForRay

_NAMESPACE: Final = "RAY_external_storage_namespace"
"""Ray's own variable; every process of a Ray reads it as it starts."""

_PATIENCE_S: Final = 2.0


def choose_namespace() -> None:
    """Choose where in Redis this run's Ray keeps its state."""
    os.environ[_NAMESPACE] = f"tetris-{secrets.token_hex(8)}"


def forget_state(redis: RedisForRay) -> None:
    """Remove what this run's Ray has kept there; one that does not answer keeps it.

    Args:
        redis: The same that Ray was given.
    """
    namespace = os.environ.get(_NAMESPACE)
    if not namespace:
        return
    from redis import Redis, RedisError

    address = redis.address.partition(",")[0]
    with contextlib.suppress(RedisError):
        client = Redis.from_url(
            address if "://" in address else f"redis://{address}",
            username=redis.username or None,
            password=redis.password or None,
            socket_timeout=_PATIENCE_S,
            socket_connect_timeout=_PATIENCE_S,
        )
        with client:
            for key in client.scan_iter(f"RAY{namespace}@*", count=1000):
                client.unlink(key)
