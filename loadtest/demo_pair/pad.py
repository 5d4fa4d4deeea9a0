"""Writes a copy of a model with the same function and many more parameters.

Appended layers have zero ``o_proj`` and ``down_proj``: they compute as any layer
does and add nothing to the residual stream. One feed-forward width holds for all
layers of a configuration, so the original layers are widened too, by columns of
``down_proj`` that are zero. Everything is written layer by layer: the copy never
has to fit into memory.

The residual stream can be widened as well, by positions that nothing writes to: rows
of ``o_proj``, ``down_proj`` and columns of the embedding that are zero. RMSNorm divides
by the root of the mean square, which zeros make smaller: where the width grows by a
power of 4, weights divided by its root, a power of 2, undo that without any rounding,
and a smaller epsilon does the rest. Attention heads stay as they are.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

_WEIGHTS = "model.safetensors"
_MAX_SHARD_BYTES = 1 << 30
_BYTES = 2
# Kernels and tensor-parallel splits like round widths.
_WIDTH_MULTIPLE = 64
# 32 layers at 8 B and 10 at 50 M: the depth of models of these sizes.
_REFERENCE = (8e9, 32)
_RANDOM_STD = 0.02
# Random numbers for one tile; drawing billions would take minutes.
_TILE_SIZE = 1 << 22

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PaddedShape:
    """Sizes of a padded copy.

    Attributes:
        num_layers: Layers, the source's included.
        intermediate_size: Feed-forward width of every layer.
        num_parameters: Parameters in all (tied embeddings count once).
        hidden_size: Width of the residual stream.
    """

    num_layers: int
    intermediate_size: int
    num_parameters: int
    hidden_size: int

    @property
    def num_bytes(self) -> int:
        """Size of the weights on disk in bfloat16."""
        return self.num_parameters * _BYTES


def padded_shape(
    config: dict[str, Any], num_parameters: int, num_layers: int | None = None
) -> PaddedShape:
    """Choose depth and width that come nearest to a parameter count.

    Args:
        config: The source's ``config.json``.
        num_parameters: Parameters wanted.
        num_layers: Layers wanted; by default they grow with the fourth root of
            the parameters, as in models of ordinary proportions.

    Returns:
        The shape; its count is within half a width step of what was asked.

    Raises:
        ValueError: If the source is larger than asked, or has as many layers.
    """
    source_layers = config["num_hidden_layers"]
    source = _count(config, source_layers, config["intermediate_size"])
    smallest = _count(config, source_layers + 1, config["intermediate_size"])
    if num_parameters < smallest:
        raise ValueError(
            f"num_parameters is {num_parameters:,}, but the source has {source:,}"
            f" and one more layer makes {smallest:,}; ask for at least that many"
        )
    if num_layers is None:
        size, depth = _REFERENCE
        num_layers = round(depth * (num_parameters / size) ** 0.25)
        num_layers = max(source_layers + 1, num_layers)
        while _count(config, num_layers, config["intermediate_size"]) > num_parameters:
            num_layers -= 1
    if num_layers <= source_layers:
        raise ValueError(
            f"num_layers is {num_layers}, but the source has {source_layers};"
            " the copy needs at least one more"
        )
    return _with_width(config, num_parameters, num_layers)


def pad_target(
    source: Path,
    output: Path,
    num_parameters: int,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    seed: int = 0,
) -> PaddedShape:
    """Write a copy of ``source`` with the same function at a chosen size.

    Args:
        source: Directory of a Llama model with tied embeddings.
        output: Directory to write; created if missing.
        num_parameters: Parameters wanted, at least one layer over the source's.
        num_layers: Layers wanted, see :func:`padded_shape`.
        hidden_size: Width of the residual stream wanted: the source's (by default)
            times a power of 4.
        seed: Seed of the weights that do not matter.

    Returns:
        The shape written.

    Raises:
        ValueError: If the source cannot be padded, or not to this size.
    """
    config = _checked_config(source)
    hidden_size = hidden_size or config["hidden_size"]
    growth = hidden_size / config["hidden_size"]
    if growth < 1 or not (math.log2(growth) / 2).is_integer():
        raise ValueError(
            f"hidden_size is {hidden_size}, but the source has"
            f" {config['hidden_size']}; ask for that times a power of 4"
        )
    shape = padded_shape(
        config | {"hidden_size": hidden_size}, num_parameters, num_layers
    )
    output.mkdir(parents=True, exist_ok=True)
    if any(output.glob("*.safetensors*")):
        raise ValueError(
            f"output {output} already holds weights; delete it or choose another"
        )
    for file in source.iterdir():
        if file.suffix in {".json", ".jinja"} and "log" not in file.stem:
            shutil.copyfile(file, output / file.name)
    _write_shards(source, output, config, shape, seed)
    config |= {
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size,
        "hidden_size": shape.hidden_size,
        "rms_norm_eps": config["rms_norm_eps"] / growth,
    }
    config.pop("layer_types", None)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return shape


def _checked_config(source: Path) -> dict[str, Any]:
    config_file = source / "config.json"
    if not config_file.exists() or not (source / _WEIGHTS).exists():
        raise ValueError(
            f"source {source} needs config.json and {_WEIGHTS};"
            " train the pair first: python -m loadtest.demo_pair train"
        )
    config: dict[str, Any] = json.loads(config_file.read_text())
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"source {source} is not a Llama with tied embeddings")
    return config


def _with_width(
    config: dict[str, Any], num_parameters: int, num_layers: int
) -> PaddedShape:
    per_column = _count(config, num_layers, 1) - _count(config, num_layers, 0)
    wanted = (num_parameters - _count(config, num_layers, 0)) / per_column
    width = round(wanted / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    width = max(width, config["intermediate_size"])
    count = _count(config, num_layers, width)
    return PaddedShape(num_layers, width, count, config["hidden_size"])


def _count(config: dict[str, Any], num_layers: int, width: int) -> int:
    hidden: int = config["hidden_size"]
    vocab_size: int = config["vocab_size"]
    return (
        vocab_size * hidden
        + hidden
        + num_layers * sum(r * c for r, c in _matrices(config, width).values())
        + num_layers * 2 * hidden
    )


def _matrices(config: dict[str, Any], width: int) -> dict[str, tuple[int, int]]:
    """Shapes of a layer's matrices, [rows, columns]."""
    hidden = config["hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }


def _write_shards(
    source: Path,
    output: Path,
    config: dict[str, Any],
    shape: PaddedShape,
    seed: int,
) -> None:
    num_shards = -(-shape.num_bytes // _MAX_SHARD_BYTES)
    groups = _layer_groups(shape.num_layers, min(num_shards, shape.num_layers))
    index: dict[str, str] = {}
    with safe_open(source / _WEIGHTS, framework="pt") as weights:
        make_layer = _layer_maker(weights.get_tensor, config, shape, seed)
        for number, layers in enumerate(groups, start=1):
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
            name = name if len(groups) > 1 else _WEIGHTS
            tensors: Tensors = {}
            if number == 1:
                name_of_embedding = "model.embed_tokens.weight"
                embedding = weights.get_tensor(name_of_embedding)
                columns = shape.hidden_size - embedding.shape[1]
                tensors[name_of_embedding] = functional.pad(embedding, (0, columns))
                norm = weights.get_tensor("model.norm.weight")
                tensors["model.norm.weight"] = _widen_norm(norm, shape.hidden_size)
            for layer in layers:
                tensors |= make_layer(layer)
            save_file(tensors, output / name, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, name)
            _say(f"{name}: layers {layers[0]} to {layers[-1]} of {shape.num_layers}")
    if len(groups) > 1:
        text = {"metadata": {"total_size": shape.num_bytes}, "weight_map": index}
        index_file = output / f"{_WEIGHTS}.index.json"
        index_file.write_text(json.dumps(text, indent=1) + "\n")


def _layer_groups(num_layers: int, num_groups: int) -> list[range]:
    edges = [num_layers * n // num_groups for n in range(num_groups + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _layer_maker(
    read: Callable[[str], torch.Tensor],
    config: dict[str, Any],
    shape: PaddedShape,
    seed: int,
) -> Callable[[int], Tensors]:
    """Return a function from a layer's number to its tensors."""
    generator = torch.Generator().manual_seed(seed)
    tile = torch.empty(_TILE_SIZE, dtype=torch.bfloat16)
    tile.normal_(std=_RANDOM_STD, generator=generator)
    wide = config | {"hidden_size": shape.hidden_size}
    matrices = _matrices(wide, shape.intermediate_size)

    def matrix(name: str, size: tuple[int, int]) -> torch.Tensor:
        if name.endswith(("o_proj", "down_proj")):
            return torch.zeros(size, dtype=torch.bfloat16)
        num_tiles = -(-size[0] * size[1] // _TILE_SIZE)
        return tile.repeat(num_tiles)[: size[0] * size[1]].reshape(size).clone()

    def make(layer: int) -> Tensors:
        prefix = f"model.layers.{layer}."
        made: Tensors = {}
        for name, size in matrices.items():
            tensor = matrix(name, size)
            if layer < config["num_hidden_layers"]:
                original = read(f"{prefix}{name}.weight")
                tensor[: original.shape[0], : original.shape[1]] = original
            made[f"{prefix}{name}.weight"] = tensor
        for name in ("input_layernorm", "post_attention_layernorm"):
            key = f"{prefix}{name}.weight"
            own = layer < config["num_hidden_layers"]
            made[key] = (
                _widen_norm(read(key), shape.hidden_size)
                if own
                else torch.ones(shape.hidden_size, dtype=torch.bfloat16)
            )
        return made

    return make


def _widen_norm(weight: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """Return a norm's weights for a stream whose further positions are zero."""
    factor = math.sqrt(weight.shape[0] / hidden_size)
    widened = torch.ones(hidden_size, dtype=weight.dtype)
    widened[: weight.shape[0]] = weight * factor
    return widened


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
