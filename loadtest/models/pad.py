"""Writes a copy of a model with the same function and more parameters.

Appended layers have zero ``o_proj`` and ``down_proj``: they compute as any layer does
and add nothing to the residual stream. One feed-forward width holds for all layers of a
configuration, so the original layers are widened too, by columns of ``down_proj`` that
are zero. Heads, and so each layer's KV cache, stay the source's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

# Kernels and tensor-parallel splits like round widths.
_WIDTH_MULTIPLE = 64
# 32 layers at 8 B and 10 at 50 M: the depth of models of these sizes.
_REFERENCE = (8e9, 32)
_SILENT = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class PaddedShape:
    """Sizes of a padded copy.

    Attributes:
        num_layers: Layers, the source's included.
        intermediate_size: Feed-forward width of every layer.
        num_parameters: Parameters in all (tied embeddings count once).
    """

    num_layers: int
    intermediate_size: int
    num_parameters: int


def padded_shape(
    config: Mapping[str, Any], num_parameters: int, num_layers: int | None = None
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
    fewest, width = config["num_hidden_layers"] + 1, config["intermediate_size"]
    smallest = _count(config, fewest, width)
    if num_parameters < smallest:
        raise ValueError(
            f"num_parameters is {num_parameters:,}, but the source and one more layer"
            f" make {smallest:,}; ask for at least that many"
        )
    if num_layers is None:
        size, depth = _REFERENCE
        num_layers = max(fewest, round(depth * (num_parameters / size) ** 0.25))
        while _count(config, num_layers, width) > num_parameters:
            num_layers -= 1
    if num_layers < fewest:
        raise ValueError(
            f"num_layers is {num_layers}, but the source has {fewest - 1};"
            " the copy needs at least one more"
        )
    unwidened = _count(config, num_layers, 0)
    per_column = _count(config, num_layers, 1) - unwidened
    wanted = (num_parameters - unwidened) / per_column
    width = max(width, round(wanted / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE)
    return PaddedShape(num_layers, width, _count(config, num_layers, width))


@torch.no_grad()
def pad_target(
    source: Path,
    output: Path,
    num_parameters: int,
    *,
    num_layers: int | None = None,
    seed: int = 0,
) -> PaddedShape:
    """Write a copy of ``source`` with the same function at a chosen size.

    Args:
        source: Directory of a Llama model with tied embeddings.
        output: Directory to write; the weights have to fit into memory.
        num_parameters: Parameters wanted, at least one layer over the source's.
        num_layers: Layers wanted, see :func:`padded_shape`.
        seed: Seed of the weights that do not matter.

    Returns:
        The shape written.

    Raises:
        ValueError: If the source cannot be padded, or not to this size.
    """
    config_file = source / "config.json"
    if not config_file.exists():
        raise ValueError(
            f"source {source} holds no config.json;"
            " train the pair first: python -m loadtest.models train"
        )
    config = json.loads(config_file.read_text())
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"source {source} is not a Llama with tied embeddings")
    shape = padded_shape(config, num_parameters, num_layers)
    config |= {
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size,
    }
    config.pop("layer_types", None)
    model = _make_random(LlamaConfig.from_dict(config), seed)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(_SILENT):
            weight.zero_()
    for name, weight in original.state_dict().items():
        weights[name][tuple(map(slice, weight.shape))] = weight
    _write(model, source, output)
    return shape


def write_untrained(source: Path, output: Path, *, seed: int = 0) -> None:
    """Write a model of the source's shape with random weights, and its tokenizer.

    A drafter of no use: it shows what speculation costs where it fails.

    Raises:
        ValueError: If the output holds weights.
    """
    _write(_make_random(AutoConfig.from_pretrained(source), seed), source, output)


def _make_random(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _write(model: Any, source: Path, output: Path) -> None:
    if any(output.glob("*.safetensors*")):
        raise ValueError(
            f"{output} already holds weights; delete it or choose another --output"
        )
    model.save_pretrained(output)
    for pattern in ("token*", "*.jinja", "generation_config.json"):
        for file in source.glob(pattern):
            shutil.copy(file, output)


def _count(config: Mapping[str, Any], num_layers: int, width: int) -> int:
    hidden: int = config["hidden_size"]
    heads: int = config["num_attention_heads"] + config["num_key_value_heads"]
    layer: int = hidden * (2 * heads * config["head_dim"] + 3 * width + 2)
    embedding: int = hidden * config["vocab_size"]
    return embedding + num_layers * layer + hidden
