"""A model directory's size and digest, without loading a weight."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any


def count_parameters(path: Path) -> int:
    """Count the parameters in a model's weight files."""
    return sum(
        math.prod(tensor["shape"])
        for file in path.glob("*.safetensors")
        for name, tensor in _read_header(file).items()
        if name != "__metadata__"
    )


def digest_model(path: Path) -> str:
    """Return a short digest of a model's configuration, tokenizer and weights."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.name in {"config.json", "tokenizer.json"} or (
            file.suffix in {".safetensors", ".jinja"}
        ):
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def describe_model(path: Path) -> dict[str, Any]:
    """Return a model's name, size and digest."""
    return {
        "name": path.name,
        "parameters": count_parameters(path),
        "digest": digest_model(path),
    }


def _read_header(file: Path) -> dict[str, Any]:
    """Read a safetensors header: its length in eight bytes, then JSON."""
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header: dict[str, Any] = json.loads(content.read(length))
    return header
