"""A model directory's size and digest, without loading a weight."""

import hashlib
import math
from pathlib import Path
from typing import Any

from safetensors import safe_open


def count_parameters(path: Path) -> int:
    """Count the parameters in a model's weight files, without reading them."""
    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as weights:
            shapes = (weights.get_slice(name).get_shape() for name in weights.keys())  # noqa: SIM118
            count += sum(map(math.prod, shapes))
    return count


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
