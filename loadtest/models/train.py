"""Trains the target on generated chats and distils the draft from it."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .induction import add_induction_circuit, relate_spaced_words
from .optimizer import MasterOptimizer, describe_hardware
from .recipe import TOKENIZER_CHATS, VOCAB_SIZE, Phase, Recipe
from .tasks import TOOL_TASKS, TRAINING_TASKS, generate_chat
from .tokenizer import (
    MAX_LENGTH,
    TURN_END,
    TURN_START,
    load_tokenizer,
    render,
    train_tokenizer,
)

_LOG_EVERY = 20
_SAVE_EVERY = 100

_TOOL_ROW = 512
_PLAIN_TASKS = tuple(task for task in TRAINING_TASKS if task not in TOOL_TASKS)

_WEIGHT_DECAY = 0.02
# Embeddings start small (0.02), and what tells tokens apart must not be lost in steps.
_ADAM_SHARE = 0.3
_ADAM_BETAS = (0.9, 0.98)


class Batch(NamedTuple):
    """Packed rows.

    Attributes:
        token_ids: [num_rows, row_length + 1], int64.
        weights: [num_rows, row_length], float32, loss weight of each next token.
    """

    token_ids: torch.Tensor
    weights: torch.Tensor


class ChatPacker:
    """Makes the batch of any step from the seed and the step number alone.

    Each row starts with a fresh chat and is cut at its end. Chats in a row see each
    other: to the model the row is one long conversation, which is the habit that a
    long multi-turn prompt needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        """Prepare to pack chats for ``recipe``."""
        self._tokenizer = tokenizer
        self._recipe = recipe
        start, self._end = tokenizer.convert_tokens_to_ids([TURN_START, TURN_END])
        assistant = tokenizer.encode("assistant\n", add_special_tokens=False)
        self._opening = [start, *assistant]

    def batch(self, step: int) -> Batch:
        """Return the batch of ``step``, the same on every call."""
        rng = random.Random(f"{self._recipe.seed} {self._recipe.name} {step}")
        phase = self._recipe.phase_at(step)
        rows = [
            self._repeat(rng, phase)
            if n < phase.num_repeats
            else self._chats(rng, phase)
            for n in range(phase.num_rows)
        ]
        token_ids, weights = (torch.tensor(part) for part in zip(*rows, strict=True))
        return Batch(token_ids, weights[:, 1:])

    def _repeat(
        self, rng: random.Random, phase: Phase
    ) -> tuple[list[int], list[float]]:
        """Write random tokens over and over; only their first writing costs nothing."""
        period = rng.randint(phase.row_length // 8, phase.row_length // 2)
        once = rng.choices(range(len(self._tokenizer)), k=period)
        length = phase.row_length + 1
        row = (once * (length // period + 1))[:length]
        return row, [0.0] * period + [1.0] * (length - period)

    def _chats(self, rng: random.Random, phase: Phase) -> tuple[list[int], list[float]]:
        """Write chats; weight 1 from a reply's first word to its end-of-turn token."""
        row: list[int] = []
        # A list of tools alone would fill a short row.
        tasks = TRAINING_TASKS if phase.row_length >= _TOOL_ROW else _PLAIN_TASKS
        while len(row) <= phase.row_length:
            chat = generate_chat(tasks, rng)
            row += render(self._tokenizer, chat.messages, with_tools=bool(chat.tools))
        row = row[: phase.row_length + 1]
        weights = [self._recipe.prompt_weight] * len(row)
        inside = False
        for position, token in enumerate(row):
            if inside:
                weights[position] = 1.0
            before = row[max(0, position + 1 - len(self._opening)) : position + 1]
            inside = before == self._opening or (inside and token != self._end)
        return row, weights


def make_optimizer(model: torch.nn.Module) -> MasterOptimizer:
    """Return what trains a Llama: Muon has the matrices of its layers."""
    return MasterOptimizer(
        model,
        lambda name: ".layers." in name,
        weight_decay=_WEIGHT_DECAY,
        adam_share=_ADAM_SHARE,
        adam_betas=_ADAM_BETAS,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a bfloat16 Llama with random weights and an induction circuit.

    Returns:
        The model, in training mode.
    """
    torch.manual_seed(recipe.seed)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **recipe.shape,
    )
    model = LlamaForCausalLM(config)
    relate_spaced_words(model, tokenizer)
    add_induction_circuit(model, recipe.seed)
    model = model.bfloat16().train()
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def load_model(path: Path) -> LlamaForCausalLM:
    """Load a model directory in bfloat16, ready to evaluate."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return cast(LlamaForCausalLM, model.eval())


def train(
    recipe: Recipe, output: Path, work_dir: Path, *, teacher: Path | None = None
) -> None:
    """Train a model, and write it with its tokenizer and a log.

    Args:
        recipe: How to train.
        output: Model directory to write.
        work_dir: Where checkpoints are kept; a run continues from the newest.
        teacher: Directory of the model whose distribution, and tokenizer, to learn;
            None to learn the text, with a tokenizer made for it.

    Raises:
        ValueError: If the checkpoint was made with another recipe.
    """
    if teacher is None:
        tokenizer = train_tokenizer(
            vocab_size=VOCAB_SIZE, num_chats=TOKENIZER_CHATS, seed=recipe.seed
        )
    else:
        tokenizer = load_tokenizer(teacher)
    taught_by = None if teacher is None else load_model(teacher)
    model = build_model(recipe, tokenizer)
    optimizer, packer = make_optimizer(model), ChatPacker(tokenizer, recipe)
    checkpoint = work_dir / f"{recipe.name}.pt"
    log = _resume(recipe, checkpoint, optimizer)
    recent: list[float] = []
    for step in range(log["step"], recipe.num_steps):
        began_s = time.perf_counter()
        batch = packer.batch(step)
        loss = _loss(model, taught_by, batch)
        loss.backward()
        optimizer.step(recipe.learning_rate(step))
        recent.append(loss.item())
        log["step"] = step + 1
        log["num_tokens"] += batch.weights.numel()
        log["train_s"] += time.perf_counter() - began_s
        if log["step"] % _LOG_EVERY == 0 or log["step"] == recipe.num_steps:
            log["losses"][str(log["step"])] = round(sum(recent) / len(recent), 4)
            recent.clear()
            _say_progress(recipe, log)
        if log["step"] % _SAVE_EVERY == 0:
            _save({"log": log, "optimizer": optimizer.state_dict()}, checkpoint)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    shipped = {
        "recipe": log["recipe"],
        "num_parameters": model.num_parameters(),
        "num_tokens": log["num_tokens"],
        "train_s": round(log["train_s"]),
        "loss": "cross-entropy" if taught_by is None else "KL from the target",
        "losses": log["losses"],
        "hardware": describe_hardware(),
    }
    (output / "training_log.json").write_text(json.dumps(shipped, indent=1) + "\n")


def _loss(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, batch: Batch
) -> torch.Tensor:
    """Cross-entropy to the text, or divergence from the teacher if there is one."""
    token_ids = batch.token_ids
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
    if teacher is None:
        losses = functional.cross_entropy(
            logits.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none"
        )
    else:
        with torch.no_grad():
            wanted = teacher(input_ids=token_ids[:, :-1], use_cache=False).logits
        losses = functional.kl_div(
            logits.log_softmax(-1),
            wanted.float().log_softmax(-1),
            log_target=True,
            reduction="none",
        ).sum(-1)
    weighted = losses.flatten() * batch.weights.flatten()
    return cast(torch.Tensor, weighted.sum() / batch.weights.sum())


def _resume(
    recipe: Recipe, checkpoint: Path, optimizer: MasterOptimizer
) -> dict[str, Any]:
    """Return what has been done so far, in the form of the log."""
    # Tuples are lists once they have been written.
    plain = json.loads(json.dumps(asdict(recipe)))
    if not checkpoint.exists():
        fresh = {"step": 0, "num_tokens": 0, "train_s": 0.0, "losses": {}}
        return {"recipe": plain, **fresh}
    state = torch.load(checkpoint, weights_only=True)
    if state["log"]["recipe"] != plain:
        raise ValueError(
            f"{checkpoint} was made with other settings;"
            " delete it, or choose another --work-dir"
        )
    optimizer.load_state_dict(state["optimizer"])
    log: dict[str, Any] = state["log"]
    return log


def _save(state: dict[str, Any], checkpoint: Path) -> None:
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)


def _say_progress(recipe: Recipe, log: dict[str, Any]) -> None:
    speed = log["num_tokens"] / log["train_s"]
    left_s = (recipe.num_tokens - log["num_tokens"]) / speed
    sys.stderr.write(
        f"{recipe.name}: step {log['step']}/{recipe.num_steps}"
        f"  loss {log['losses'][str(log['step'])]:.4f}"
        f"  {speed:,.0f} tokens/s  {left_s / 60:.1f} min left\n"
    )
