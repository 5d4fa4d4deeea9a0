"""The file of API keys: named, scoped, and only as hashes.

A key is 256 random bits, which nobody can guess: SHA-256 at rest is right for it. The
slow, salted hashes that passwords need would protect what cannot be tried out anyway,
and make every request slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Scope = Literal["chat", "admin", "metrics"]

SCOPES: Final[tuple[Scope, ...]] = ("chat", "admin", "metrics")

KEY_PREFIX: Final = "tetris-"
"""So that scanners find keys where they do not belong."""

_NUM_KEY_BYTES: Final = 32

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Limit = Annotated[int, Field(ge=1)]


class KeyEntry(BaseModel):
    """What is known of one key.

    Attributes:
        sha256: Of the key, in hexadecimal digits.
        scopes: What it opens.
        request_class: One of `policy.classes`; None for the default class.
        requests_per_minute: None for any number, as the three below.
        tokens_per_minute: Of prompts and replies.
        max_concurrent: Requests at a time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: tuple[Scope, ...] = ("chat",)
    request_class: str | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None


_KEYS: Final = TypeAdapter(dict[Name, KeyEntry])


def make_key() -> str:
    """Return a new key."""
    return KEY_PREFIX + secrets.token_urlsafe(_NUM_KEY_BYTES)


def hash_key(key: str) -> str:
    """Return a key as it is kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: str | Path) -> dict[str, KeyEntry]:
    """Read all keys, by name.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It is not a file of keys; the message repeats nothing of it.
    """
    content = Path(path).read_bytes()
    return _check(lambda: _KEYS.validate_json(content), path)


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Keep others who change the file waiting, from its reading to its writing.

    Raises:
        OSError: There is no such folder.
    """
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_keys(path: str | Path, keys: dict[str, KeyEntry]) -> None:
    """Replace the file in one step, so that no reader finds half of it.

    Raises:
        OSError: The folder cannot be written.
        ValueError: A name is none.
    """
    file = Path(path)
    checked = _check(lambda: _KEYS.validate_python(keys), path)
    data = {
        name: entry.model_dump(mode="json", exclude_none=True)
        for name, entry in checked.items()
    }
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        # mkstemp's mode is 0600, and whoever runs this owns it; who had access before
        # keeps it, or a server could not read what root has changed.
        if file.exists():
            before = file.stat()
            os.fchmod(handle, before.st_mode & 0o777)
            os.fchown(handle, before.st_uid, before.st_gid)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(json.dumps(data, indent=2) + "\n")
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check(
    validate: Callable[[], dict[str, KeyEntry]], path: str | Path
) -> dict[str, KeyEntry]:
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path}: {where}: {first['msg']}") from None
