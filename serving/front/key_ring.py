"""The API keys as a front knows them at the moment."""

from __future__ import annotations

import hmac
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from serving.settings.key_file import hash_key, read_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from serving.settings.key_file import KeyEntry

logger = logging.getLogger("ray.serve")

LOOK_AGAIN_S: Final = 1.0


class KeyRing:
    """Follows a file of keys.

    A file that is gone or broken changes nothing: the last good one holds, and the log
    says so. Kubernetes replaces a mounted Secret by links, which are followed.
    """

    def __init__(
        self,
        path: str,
        classes: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file.

        Args:
            path: As `tetris-serve keys` writes it.
            classes: Of the deployment. One that a key names and that is not among them
                may have been added since, or be none (`claim_class`).
            clock: Seconds.

        Raises:
            OSError: There is none.
            ValueError: It is not a file of keys.
        """
        self._path = Path(path)
        self._classes = classes
        self._clock = clock
        self._looked_s = clock()
        self._seen = self._stamp()
        self._keys = self._read()

    def find(self, key: str) -> tuple[str, KeyEntry] | None:
        """Return the name and the entry of a key, None for a wrong one.

        All entries are compared, each in constant time, whichever it is.
        """
        self._look()
        digest, found = hash_key(key), None
        for name, entry in self._keys.items():
            if hmac.compare_digest(entry.sha256, digest):
                found = name, entry
        return found

    def _look(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            self._keys = self._read()
            logger.info("Read %d API keys anew", len(self._keys))
        except (OSError, ValueError) as error:
            logger.error("The API keys stay as they were: %s", error)

    def _stamp(self) -> tuple[int, ...]:
        stat = self._path.stat()
        # The last one tells of permissions too.
        return stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_ctime_ns

    def _read(self) -> dict[str, KeyEntry]:
        keys = read_keys(self._path)
        for name, entry in keys.items():
            one = entry.request_class
            if one is not None and one not in self._classes:
                # No reason to go on with the old ones: a key may be gone from these.
                logger.warning(
                    "%s: %s.request_class: %s was none when the front started",
                    *(self._path, name, one),
                )
        return keys
