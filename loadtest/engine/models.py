"""The model pair: checks, KV cache need, and the padded target."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from loadtest.client.errors import LoadTestError
from loadtest.model_files import digest_model

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

KV_BLOCK_TOKENS = 128
"""vLLM's block size on the CPU: every request's last block is partly empty."""

_KV_MARGIN = 1.3


def check_models(target: Path, draft: Path) -> None:
    """Check that two directories hold models, and the target's a tokenizer too.

    Raises:
        LoadTestError: If one does not; the message names the option.
    """
    for option, path in (("--target", target), ("--draft", draft)):
        if not (path / "config.json").exists() or not list(path.glob("*.safetensors")):
            raise LoadTestError(
                f"{option} {path} holds no model (config.json and *.safetensors); "
                "name another directory"
            )
    if not (target / "tokenizer.json").exists():
        raise LoadTestError(
            f"--target {target} holds no tokenizer.json, which the requests are made "
            "with; copy it there or name another directory"
        )


def kv_cache_bytes(
    target: Path, draft: Path, dtype: str, num_tokens: int, num_requests: int
) -> int:
    """Return the KV cache with which no request ever waits for memory.

    Args:
        target: Target directory.
        draft: Draft directory. Every arm gets the room of both models.
        dtype: Of the cache.
        num_tokens: Tokens in flight at most, summed over requests.
        num_requests: Requests in flight at most.
    """
    # vLLM gives all layers pages of one size, that of the largest.
    width = max(_kv_width(target), _kv_width(draft))
    layers = _read_config(target)["num_hidden_layers"]
    layers += _read_config(draft)["num_hidden_layers"]
    slots = num_tokens + 2 * KV_BLOCK_TOKENS * num_requests
    needed = slots * layers * width * DTYPE_BYTES[dtype]
    return int(needed * _KV_MARGIN) + (16 << 20)


def pad(source: Path, num_parameters: int, cache: Path) -> Path:
    """Return a copy of a model with the same function and more parameters.

    Made once for each source and size, and kept.

    Raises:
        LoadTestError: If the source cannot be padded to this size.
    """
    output = cache / f"{source.name}-{num_parameters}-{digest_model(source)[:8]}"
    if output.exists():
        return output
    from loadtest.models.pad import pad_target

    unfinished = output.with_name(f"{output.name}.{os.getpid()}")
    try:
        pad_target(source, unfinished, num_parameters)
        unfinished.rename(output)
    except ValueError as error:
        raise LoadTestError(
            f"--target-parameters {num_parameters}: {error}; or leave the target as "
            "it is with --target-parameters 0"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return output


def _kv_width(path: Path) -> int:
    config = _read_config(path)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * int(config.get("num_key_value_heads") or heads) * int(head_dim)


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config
