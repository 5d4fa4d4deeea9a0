"""The model pair: checks, memory, and the padded target."""

import json
import os
from pathlib import Path

import psutil

from loadtest.environment import REPO
from loadtest.errors import LoadTestError
from loadtest.model_files import count_parameters, digest_model

_CACHE = REPO / ".cache" / "engine_bench"
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_BLOCK_TOKENS = 128
"""vLLM's block size on the CPU: every request's last block is partly empty."""

_KV_MARGIN = 1.3
_ENGINE_BYTES = 1100 << 20
"""Memory of a vLLM process before weights and KV cache."""


def check_models(target: Path, draft: Path) -> None:
    """Raise unless both directories hold models, and the target's a tokenizer too."""
    needed = ["config.json", "*.safetensors"]
    for option, path, files in (
        ("--target", target, [*needed, "tokenizer.json"]),
        ("--draft", draft, needed),
    ):
        if missing := [name for name in files if not list(path.glob(name))]:
            raise LoadTestError(f"{option} {path} holds no {', '.join(missing)}")


def find_method(draft: Path) -> str:
    """Return how a draft drafts, in the words of `policy.method`."""
    config = json.loads((draft / "config.json").read_text())
    name = "".join(config.get("architectures", ()))
    return "eagle3" if "Eagle3" in name else "draft_model"


def size_kv_cache(
    target: Path,
    draft: Path,
    dtype: str,
    num_requests: int,
    length: int,
    num_engines: int,
) -> int:
    """Return bytes of KV cache, of both models, so that no request waits for it."""
    layers, widths = 0, []
    for path in (target, draft):
        config = json.loads((path / "config.json").read_text())
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        widths.append(2 * (config.get("num_key_value_heads") or heads) * head_dim)
        layers += config["num_hidden_layers"]
    slots = num_requests * (length + 2 * _BLOCK_TOKENS)
    # vLLM gives all layers pages of one size, that of the largest.
    needed = slots * layers * max(widths) * _DTYPE_BYTES[dtype]
    kv_bytes = int(needed * _KV_MARGIN) + (16 << 20)
    # Not the size of the files: float32 takes twice what bfloat16 takes there.
    parameters = count_parameters(target) + count_parameters(draft)
    each = _ENGINE_BYTES + _DTYPE_BYTES[dtype] * parameters + kv_bytes
    available = psutil.virtual_memory().available
    if each * num_engines > available:
        raise LoadTestError(
            f"{num_engines} engines take about {each * num_engines / 2**30:.1f} GiB "
            f"and {available / 2**30:.1f} GiB are free: name at most "
            f"{available // each} with --policies, or lower --target-parameters or "
            "--concurrency"
        )
    return kv_bytes


def pad(source: Path, num_parameters: float) -> Path:
    """Return a copy of a model with the same function and more parameters.

    Made once for each source and size, and kept; for 0 it is the source itself.
    """
    size = int(num_parameters)
    if not size:
        return source
    output = _CACHE / f"{source.name}-{size}-{digest_model(source)[:8]}"
    if not output.exists():
        # Takes seconds, which only who pads shall wait for.
        from loadtest.models.pad import pad_target

        unfinished = output.with_name(f"{output.name}.{os.getpid()}")
        try:
            pad_target(source, unfinished, size)
        except ValueError as error:
            raise LoadTestError(f"--target-parameters: {error}; 0 pads none") from None
        unfinished.rename(output)
    return output
