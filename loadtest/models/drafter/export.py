"""The trained drafter as a model folder: written, measured in vLLM, and described."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaForCausalLM

from loadtest.models.describe import LOG, write_json
from loadtest.page import make_environment
from serving.offline import OfflineEngine, start_arguments

from .chats import WorkDir, is_held_out, read_shard
from .head import head_config
from .small import SmallModel

EVALUATION = "evaluation.json"

_POINTS_SHOWN = 12
_NUM_SEQS = 16
_ANSWER_TOKENS = 256
_MEASURED = {
    "temperature_0": (0, "greedy"),
    "temperature_1": (1, "greedy"),
    "temperature_1_drawn": (1, "probabilistic"),
}
"""Temperatures, and how drafts are taken: the likeliest token, or one that is drawn."""


def export(target: Path, work_dir: WorkDir, output: Path) -> None:
    """Write the newest checkpoint as a folder that vLLM loads.

    Raises:
        ValueError: There is no checkpoint.
    """
    if not work_dir.checkpoint.exists():
        raise ValueError(f"{work_dir.path} holds no checkpoint; run the command train")
    saved = torch.load(work_dir.checkpoint, map_location="cpu", weights_only=True)
    state, weights = saved["state"], saved["weights"]
    vocabulary = torch.tensor(state["vocabulary"])
    own, recipe = AutoConfig.from_pretrained(target), state["recipe"]
    output.mkdir(parents=True, exist_ok=True)
    if recipe["method"] == "draft_model":
        weights = _export_small(own, recipe["width"], weights, output)
    else:
        _export_head(own, weights, vocabulary, recipe["aux_layer_ids"], output)
    kept = ("num_chats", "num_answer_tokens", "tokens_seen", "curve", "hardware")
    log = {
        "target": target.name,
        "recipe": recipe,
        "num_parameters": sum(weight.numel() for weight in weights.values()),
        "train_s": round(state["train_s"]),
        **{name: state[name] for name in kept},
    }
    write_json(output / LOG, log)
    (output / EVALUATION).unlink(missing_ok=True)
    _describe(output)


def _export_head(
    target: Any,
    weights: dict[str, torch.Tensor],
    vocabulary: torch.Tensor,
    layers: Sequence[int],
    output: Path,
) -> None:
    config = head_config(target, len(vocabulary), layers)
    config["dtype"] = str(weights["fc.weight"].dtype).removeprefix("torch.")
    # vLLM adds it to the number of a draft token.
    more = {"d2t": vocabulary - torch.arange(len(vocabulary))}
    save_file(weights | more, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _export_small(
    target: Any, width: int, weights: dict[str, torch.Tensor], output: Path
) -> dict[str, torch.Tensor]:
    """Write the model, and return its weights, tied ones once."""
    trained = SmallModel(target, width)
    trained.load_state_dict(weights)
    # By the name under which vLLM knows it.
    model = LlamaForCausalLM(trained.config)
    model.load_state_dict(trained.state_dict())
    model.bfloat16().save_pretrained(output)
    return dict(model.named_parameters())


def evaluate(
    target: Path,
    work_dir: WorkDir,
    head: Path,
    draft_tokens: int,
    num_prompts: int,
    *,
    dtype: str,
) -> dict[str, Any]:
    """Let the target answer held-out prompts with the head, and renew its card.

    Returns:
        What is written to the folder's ``evaluation.json``: by temperature and
        position the share accepted of the drafts whose forerunners were.

    Raises:
        ValueError: No chats are held out.
    """
    held_out = [shard for shard in work_dir.shards() if is_held_out(shard)]
    chats = [c for shard in held_out for c in read_shard(work_dir.chats_of(shard))]
    prompts = [chat.token_ids[: chat.answers[0][0]] for chat in chats[:num_prompts]]
    if not prompts:
        raise ValueError(f"{work_dir.path} holds no chats; run the command generate")
    end = json.loads((target / "config.json").read_text())["eos_token_id"]
    accepted = {}
    for name, (temperature, draft_sampling) in _MEASURED.items():
        engine = _start((target, head), prompts, draft_tokens, draft_sampling, dtype)
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=_ANSWER_TOKENS,
            stop_token_ids=[end],
            detokenize=False,
        )
        before = _counts(engine)
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, sampling.clone())
        left = len(prompts)
        while left:
            left -= sum(one.finished for one in engine.step())
        after = _counts(engine)
        engine.shutdown()
        survived = itertools.pairwise(b - a for a, b in zip(before, after, strict=True))
        accepted[name] = [round(one / max(1, earlier), 4) for earlier, one in survived]
    report = {"num_prompts": len(prompts), "accepted": accepted}
    write_json(head / EVALUATION, report)
    _describe(head)
    return report


def _start(
    pair: tuple[Path, Path],
    prompts: Sequence[Sequence[int]],
    draft_tokens: int,
    draft_sampling: str,
    dtype: str,
) -> OfflineEngine:
    """Start an engine that drafts so many tokens in each step.

    Not on vLLM's own worker, whose tokens at temperature 1 are others than the
    target's: ours repairs two of its rejection sampler's CPU kernels.
    """
    target, head = pair
    recipe = json.loads((head / LOG).read_text())["recipe"]
    arguments, env = start_arguments(
        {
            "model": {"id": "head", "target": str(target), "draft": str(head)},
            "policy": {
                "name": "fixed",
                "method": recipe.get("method", "eagle3"),
                "draft_tokens": draft_tokens,
                "draft_sampling": draft_sampling,
            },
            "engine": {
                "device": "cpu",
                "dtype": dtype,
                "max_model_len": max(map(len, prompts)) + _ANSWER_TOKENS + draft_tokens,
                "max_num_seqs": _NUM_SEQS,
                "kv_cache_memory_bytes": 1 << 30,
                "enforce_eager": True,
            },
        }
    )
    os.environ.update(env)
    return OfflineEngine(arguments)


def _counts(engine: OfflineEngine) -> list[int]:
    """Return how often was drafted, and accepted at each position."""
    counted = engine.snapshot()
    assert counted is not None
    return [counted["num_drafts"], *counted["num_accepted_tokens_per_pos"]]


def _describe(folder: Path) -> None:
    """Write the card from the log, and the evaluation if there is one."""
    log, evaluation = json.loads((folder / LOG).read_text()), folder / EVALUATION
    every = max(1, -(-len(log["curve"]) // _POINTS_SHOWN))
    card = make_environment(Path(__file__).parent).get_template("card.md.jinja")
    text = card.render(
        log=log,
        shown=log["curve"][::-every][::-1],
        evaluation=json.loads(evaluation.read_text()) if evaluation.exists() else None,
    )
    (folder / "README.md").write_text(text)
