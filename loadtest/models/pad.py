"""Writes a copy of a model with the same function and more parameters.

Appended layers have zero ``o_proj`` and ``down_proj``: they compute as any layer does
and add nothing to the residual stream. One feed-forward width holds for all layers of a
configuration, so the original layers are widened too, by columns of ``down_proj`` that
are zero. Heads, and so each layer's KV cache, stay the source's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from .tokenizer import copy_tokenizer

# Kernels and tensor-parallel splits like round widths.
_WIDTH_MULTIPLE = 64
# 32 layers at 8 B and 10 at 50 M: the depth of models of these sizes.
_REFERENCE_SIZE, _REFERENCE_DEPTH = 8e9, 32
_SILENT = ("o_proj.weight", "down_proj.weight")


def padded_shape(config: Mapping[str, Any], num_parameters: int) -> tuple[int, int]:
    """Return the depth and width that come nearest to a parameter count.

    Layers grow with the fourth root of the parameters, as in models of ordinary
    proportions.

    Raises:
        ValueError: If the source and one more layer are larger than asked.
    """
    fewest, narrowest = config["num_hidden_layers"] + 1, config["intermediate_size"]
    growth = (num_parameters / _REFERENCE_SIZE) ** 0.25
    most = max(fewest, round(_REFERENCE_DEPTH * growth))
    for num_layers in range(most, fewest - 1, -1):
        left = num_parameters - _count(config, num_layers, 0)
        wanted = left / (3 * config["hidden_size"] * num_layers)
        width = round(wanted / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        if width >= narrowest:
            return num_layers, width
    raise ValueError(
        f"num_parameters is {num_parameters:,}, but the source and one more layer make "
        f"{_count(config, fewest, narrowest):,}; ask for at least that many"
    )


def _count(config: Mapping[str, Any], num_layers: int, width: int) -> int:
    hidden: int = config["hidden_size"]
    heads: int = config["num_attention_heads"] + config["num_key_value_heads"]
    layer: int = hidden * (2 * heads * config["head_dim"] + 3 * width + 2)
    embedding: int = hidden * config["vocab_size"]
    return embedding + num_layers * layer + hidden


@torch.no_grad()
def pad_target(source: Path, output: Path, num_parameters: int) -> None:
    """Write a copy of ``source`` with the same function at a chosen size.

    Raises:
        ValueError: If the source cannot be padded, or not to this size.
    """
    config_file = source / "config.json"
    if not config_file.exists():
        raise ValueError(
            f"source {source} holds no config.json;"
            " train the pair first: python -m loadtest.models"
        )
    config = json.loads(config_file.read_text())
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"source {source} is not a Llama with tied embeddings")
    layers, width = padded_shape(config, num_parameters)
    config |= {"num_hidden_layers": layers, "intermediate_size": width}
    config.pop("layer_types", None)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        LlamaConfig.from_dict(config), dtype=torch.bfloat16
    )
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(_SILENT):
            weight.zero_()
    for name, weight in original.state_dict().items():
        weights[name][tuple(map(slice, weight.shape))] = weight
    model.generation_config = original.generation_config
    model.save_pretrained(output)
    copy_tokenizer(source, output)
