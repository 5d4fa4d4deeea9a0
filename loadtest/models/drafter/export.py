"""Writes the trained head as a model folder, with its card."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from loadtest.models.describe import describe_hardware, load_template

from .chats import WorkDir, read_shard
from .head import head_config

EVALUATION = "evaluation.json"
_LOG = "training_log.json"
_POINTS_SHOWN = 12


def export(target: Path, work_dir: WorkDir, output: Path) -> None:
    """Write the newest checkpoint as a folder that vLLM loads.

    Raises:
        ValueError: There is no checkpoint.
    """
    if not work_dir.checkpoint.exists():
        raise ValueError(f"{work_dir.path} holds no checkpoint; run the command train")
    saved = torch.load(work_dir.checkpoint, weights_only=True)
    state, weights = saved["state"], saved["weights"]
    vocabulary = torch.tensor(state["vocabulary"])
    layers = state["recipe"]["aux_layer_ids"]
    config = head_config(AutoConfig.from_pretrained(target), len(vocabulary), layers)
    config["dtype"] = str(weights["fc.weight"].dtype).removeprefix("torch.")
    chats = [chat for n in state["shards"] for chat in read_shard(work_dir.chats_of(n))]
    log = {
        "target": target.name,
        "recipe": state["recipe"],
        "num_parameters": sum(weight.numel() for weight in weights.values()),
        "num_chats": len(chats),
        "num_answer_tokens": sum(e - b for chat in chats for b, e in chat.answers),
        "tokens_seen": state["tokens_seen"],
        "train_s": round(state["train_s"]),
        "curve": state["curve"],
        "hardware": describe_hardware(),
    }
    output.mkdir(parents=True, exist_ok=True)
    # vLLM adds it to the number of a draft token.
    weights["d2t"] = vocabulary - torch.arange(len(vocabulary))
    save_file(weights, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (output / _LOG).write_text(json.dumps(log, indent=1) + "\n")
    (output / EVALUATION).unlink(missing_ok=True)
    write_card(output)


def write_card(folder: Path) -> None:
    """Write ``README.md`` from the log, and the evaluation if there is one."""
    log, evaluation = json.loads((folder / _LOG).read_text()), folder / EVALUATION
    every = max(1, -(-len(log["curve"]) // _POINTS_SHOWN))
    card = load_template(Path(__file__).with_name("card.md.jinja")).render(
        log=log,
        shown=log["curve"][::-every][::-1],
        evaluation=json.loads(evaluation.read_text()) if evaluation.exists() else None,
    )
    (folder / "README.md").write_text(card)
