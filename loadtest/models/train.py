"""Trains the target on generated chats and distils the draft from it."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .describe import LOG, describe_hardware, write_json
from .induction import add_induction_circuit, relate_spaced_words
from .optimizer import MasterOptimizer
from .recipe import TARGET_DIR, Phase, Recipe
from .tasks import TOOL_TASKS, TRAINING_TASKS, generate_chat
from .tokenizer import copy_tokenizer, load_tokenizer, render

_LOG_EVERY = 20

# A list of tools alone would fill a shorter row.
_TOOL_ROW = 512
_PLAIN_TASKS = tuple(task for task in TRAINING_TASKS if task not in TOOL_TASKS)


def train(recipe: Recipe, output: Path, *, teacher: Path | None = None) -> None:
    """Train a model, and write its directory, with tokenizer and log.

    With a teacher it learns that model's distribution, without one the text. The
    tokenizer is the shipped target's.
    """
    taught_by = None if teacher is None else load_model(teacher)
    tokenizer = load_tokenizer(TARGET_DIR)
    model = build_model(recipe, tokenizer)
    optimizer = make_optimizer(model)
    phases, began_s = recipe.steps, time.perf_counter()
    losses: dict[str, float] = {}
    recent: list[float] = []
    for step, phase in enumerate(phases):
        rng = random.Random(f"{recipe.seed} {recipe.name} {step}")
        token_ids, weights = make_batch(tokenizer, phase, rng, recipe.prompt_weight)
        loss = _loss(model, taught_by, token_ids, weights)
        loss.backward()
        optimizer.step(recipe.learning_rate(step))
        recent.append(loss.item())
        if (step + 1) % _LOG_EVERY == 0 or step + 1 == len(phases):
            losses[str(step + 1)] = mean = round(sum(recent) / len(recent), 4)
            recent.clear()
            told = f"step {step + 1}/{len(phases)}  loss {mean:.4f}"
            sys.stderr.write(f"{recipe.name}: {told}\n")
    model.save_pretrained(output)
    if output.resolve() != TARGET_DIR:
        copy_tokenizer(TARGET_DIR, output)
    log = {
        "recipe": asdict(recipe),
        "num_parameters": model.num_parameters(),
        "num_tokens": sum(phase.num_rows * phase.row_length for phase in phases),
        "train_s": round(time.perf_counter() - began_s),
        "loss": "cross-entropy" if taught_by is None else "KL from the target",
        "losses": losses,
        "hardware": describe_hardware(),
    }
    write_json(output / LOG, log)


def make_batch(
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    rng: random.Random,
    prompt_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows of chats, and rows that repeat random tokens.

    Each row starts with a fresh chat and is cut at its end. Chats in a row see each
    other: to the model the row is one long conversation, which is the habit that a
    long multi-turn prompt needs.

    Returns:
        Token ids, [num_rows, row_length + 1], int64, and the loss weight of each next
        token, [num_rows, row_length], float32.
    """
    length = phase.row_length + 1
    rows = [
        _repeat(rng, length, len(tokenizer))
        if number < phase.num_repeats
        else _chats(rng, length, tokenizer, prompt_weight)
        for number in range(phase.num_rows)
    ]
    token_ids, weights = (torch.tensor(part) for part in zip(*rows, strict=True))
    return token_ids, weights[:, 1:]


def _repeat(
    rng: random.Random, length: int, vocab_size: int
) -> tuple[list[int], list[float]]:
    """Write random tokens over and over; only their first writing costs nothing."""
    period = rng.randint((length - 1) // 8, (length - 1) // 2)
    once = rng.choices(range(vocab_size), k=period)
    row = (once * (length // period + 1))[:length]
    return row, [0.0] * period + [1.0] * (length - period)


def _chats(
    rng: random.Random,
    length: int,
    tokenizer: PreTrainedTokenizerFast,
    prompt_weight: float,
) -> tuple[list[int], list[float]]:
    """Write chats; weight 1 from a reply's first word to its end-of-turn token."""
    tasks = TRAINING_TASKS if length > _TOOL_ROW else _PLAIN_TASKS
    row: list[int] = []
    while len(row) < length:
        chat = generate_chat(tasks, rng)
        row += render(tokenizer, chat.messages, with_tools=chat.with_tools)
    row = row[:length]
    end = tokenizer.eos_token_id
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    weights, inside = [], False
    for position, token in enumerate(row, start=1):
        weights.append(1.0 if inside else prompt_weight)
        before = row[max(0, position - len(opening)) : position]
        inside = (inside and token != end) or before == opening
    return row, weights


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a bfloat16 Llama to train, random but for an induction circuit."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **recipe.shape,
    )
    model = LlamaForCausalLM(config)
    relate_spaced_words(model, tokenizer)
    add_induction_circuit(model, recipe.seed)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.bfloat16().train()


def make_optimizer(model: torch.nn.Module) -> MasterOptimizer:
    """Return what trains a Llama: Muon has the matrices of its layers."""
    return MasterOptimizer(
        model,
        lambda name: ".layers." in name,
        weight_decay=0.02,
        # Embeddings start small (0.02), and what tells tokens apart must not be lost in
        # steps.
        adam_share=0.3,
        adam_betas=(0.9, 0.98),
    )


def load_model(path: Path) -> LlamaForCausalLM:
    """Load a model directory in bfloat16, ready to evaluate."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return cast(LlamaForCausalLM, model.eval())


def _loss(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM | None,
    token_ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Cross-entropy to the text, or divergence from the teacher if there is one."""
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
    if teacher is None:
        losses = functional.cross_entropy(
            logits.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none"
        )
    else:
        with torch.no_grad():
            wanted = teacher(input_ids=token_ids[:, :-1], use_cache=False).logits
        pupils, teachers = logits.log_softmax(-1), wanted.float().log_softmax(-1)
        losses = functional.kl_div(pupils, teachers, log_target=True, reduction="none")
        losses = losses.sum(-1)
    return (losses.flatten() * weights.flatten()).sum() / weights.sum()
