"""Writes a drafter that is of no use: to see what speculation costs where it fails."""

from __future__ import annotations

import shutil
from pathlib import Path


def write_untrained(source: Path, output: Path, *, seed: int = 0) -> None:
    """Write a model of the source's shape with random weights, and its tokenizer.

    Args:
        source: Model directory to take shape and tokenizer from.
        output: Directory to write; must not exist.
        seed: Of the weights.

    Raises:
        OSError: If the source is not a model directory.
        ValueError: If the output exists.
    """
    if output.exists():
        raise ValueError(f"{output} exists; delete it or name another --output")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(config.dtype or torch.bfloat16).save_pretrained(unfinished)
    for file in sorted(source.glob("token*")) + sorted(source.glob("*.jinja")):
        shutil.copy(file, unfinished)
    unfinished.rename(output)
