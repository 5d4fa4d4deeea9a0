"""Trains the target on generated chats and distils the draft from it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .induction import add_induction_circuit, relate_spaced_words
from .optimizer import MasterOptimizer, Tensors
from .packing import Batch, ChatPacker
from .recipe import TOKENIZER_CHATS, VOCAB_SIZE, ModelShape, Recipe
from .team import Team
from .tokenizer import MAX_LENGTH, TURN_END, load_tokenizer, train_tokenizer

_LOG_EVERY = 20
_SAVE_EVERY = 100


@dataclass
class Progress:
    """What a run has done so far; written to the checkpoint with the weights."""

    step: int = 0
    num_tokens: int = 0
    train_s: float = 0.0
    losses: list[tuple[int, float]] | None = None


def build_model(
    shape: ModelShape, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """Build a bfloat16 Llama with random weights and an induction circuit.

    Args:
        shape: Model sizes.
        tokenizer: Gives vocabulary size and special tokens.
        seed: Seed of the weights.

    Returns:
        The model, in training mode.
    """
    torch.manual_seed(seed)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **vars(shape),
    )
    model = LlamaForCausalLM(config)
    relate_spaced_words(model, tokenizer)
    add_induction_circuit(model, seed)
    model = model.bfloat16().train()
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def load_model(path: Path) -> LlamaForCausalLM:
    """Load a model directory in bfloat16, ready to evaluate.

    Args:
        path: Directory with ``config.json`` and ``model.safetensors``.

    Returns:
        The model in evaluation mode.
    """
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return cast(LlamaForCausalLM, model.eval())


def train_target(
    recipe: Recipe, output: Path, work_dir: Path, *, num_processes: int
) -> None:
    """Train tokenizer and target, and write both to ``output``.

    Args:
        recipe: How to train.
        output: Model directory to write.
        work_dir: Where checkpoints are kept; a run continues from the newest.
        num_processes: Single-threaded processes, one a core.
    """
    tokenizer = train_tokenizer(
        vocab_size=VOCAB_SIZE, num_chats=TOKENIZER_CHATS, seed=recipe.seed
    )
    run = _Run(recipe, tokenizer, work_dir, Team(num_processes), teacher=None)
    run.complete(output)


def train_draft(
    recipe: Recipe, target: Path, output: Path, work_dir: Path, *, num_processes: int
) -> None:
    """Distil a draft from a trained target, and write it to ``output``.

    Args:
        recipe: How to train.
        target: Directory of the trained target.
        output: Model directory to write.
        work_dir: Where checkpoints are kept; a run continues from the newest.
        num_processes: Single-threaded processes, one a core.
    """
    teacher = load_model(target)
    tokenizer = load_tokenizer(target)
    _Run(recipe, tokenizer, work_dir, Team(num_processes), teacher).complete(output)


class _Run:
    """One model's training from its newest checkpoint to its written weights."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        work_dir: Path,
        team: Team,
        teacher: LlamaForCausalLM | None,
    ) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._teacher = teacher
        self._team = team
        self._checkpoint = work_dir / f"{recipe.name}.pt"
        self._packer = ChatPacker(tokenizer, recipe)
        self._model = build_model(recipe.shape, tokenizer, recipe.seed)
        self._model.share_memory()
        self._optimizer = MasterOptimizer(self._model.named_parameters())
        self._gradients: list[Tensors] = [
            {
                name: torch.zeros_like(parameter).share_memory_()
                for name, parameter in self._model.named_parameters()
            }
            for _ in range(team.size)
        ]
        self._progress = Progress(losses=[])

    def complete(self, output: Path) -> None:
        self._resume()
        self._team.run(self._train)
        self._write(output)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, weights_only=True)
        if state["recipe"] != json.dumps(self._recipe.as_dict()):
            raise ValueError(
                f"{self._checkpoint} was made with other settings;"
                " delete it, or choose another --work-dir"
            )
        self._optimizer.load_state_dict(state["optimizer"])
        self._progress = Progress(**state["progress"])
        _say(f"{self._recipe.name}: continuing at step {self._progress.step}")

    def _train(self, rank: int) -> None:
        """Train as one process of the team; rank 0 reports and saves."""
        recipe, progress, team = self._recipe, self._progress, self._team
        for name, parameter in self._model.named_parameters():
            parameter.grad = self._gradients[rank][name]
        recent: list[float] = []
        while progress.step < recipe.num_steps and not team.stopped:
            start = time.perf_counter()
            self._model.zero_grad(set_to_none=False)
            batch = self._packer.batch(progress.step)
            loss = self._loss(batch, rank)
            loss.backward()
            team.losses[rank] = loss.detach()
            team.meet(rank)
            recent.append(float(team.losses.sum()))
            lr = recipe.learning_rate(progress.step)
            self._optimizer.step(lr, self._gradients, rank=rank, size=team.size)
            progress.step += 1
            progress.num_tokens += batch.weights.numel()
            team.meet(rank, end_of_step=True)
            progress.train_s += time.perf_counter() - start
            if rank > 0:
                continue
            if progress.step % _LOG_EVERY == 0 or progress.step == recipe.num_steps:
                self._report(sum(recent) / len(recent))
                recent.clear()
            if progress.step % _SAVE_EVERY == 0:
                self._save()
        if rank == 0:
            self._save()

    def _loss(self, batch: Batch, rank: int) -> torch.Tensor:
        """Share of the loss that this rank's rows have in the whole batch's.

        Cross-entropy to the text, or divergence from the teacher if there is one.
        """
        rows = batch.token_ids[rank :: self._team.size]
        logits = self._model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        if self._teacher is None:
            losses = functional.cross_entropy(
                logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
            )
        else:
            with torch.no_grad():
                wanted = self._teacher(input_ids=rows[:, :-1], use_cache=False).logits
            losses = functional.kl_div(
                logits.log_softmax(-1),
                wanted.float().log_softmax(-1),
                log_target=True,
                reduction="none",
            ).sum(-1)
        weights = batch.weights[rank :: self._team.size].flatten()
        return (losses.flatten() * weights).sum() / batch.weights.sum()

    def _report(self, loss: float) -> None:
        progress, recipe = self._progress, self._recipe
        assert progress.losses is not None
        progress.losses.append((progress.step, round(loss, 4)))
        speed = progress.num_tokens / progress.train_s
        left_s = (recipe.num_tokens - progress.num_tokens) / speed
        _say(
            f"{recipe.name}: step {progress.step}/{recipe.num_steps}"
            f"  loss {loss:.4f}  {speed:,.0f} tokens/s  {left_s / 60:.1f} min left"
        )

    def _save(self) -> None:
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": json.dumps(self._recipe.as_dict()),
            "optimizer": self._optimizer.state_dict(),
            "progress": vars(self._progress),
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _write(self, output: Path) -> None:
        self._model.save_pretrained(output)
        self._tokenizer.save_pretrained(output)
        log = json.dumps(self._log(), indent=1)
        (output / "training_log.json").write_text(log + "\n")
        _say(f"{self._recipe.name}: written to {output}")

    def _log(self) -> dict[str, Any]:
        progress = self._progress
        assert progress.losses is not None
        return {
            "recipe": self._recipe.as_dict(),
            "num_parameters": self._model.num_parameters(),
            "num_tokens": progress.num_tokens,
            "train_s": round(progress.train_s),
            "loss": "cross-entropy" if self._teacher is None else "KL from the target",
            "losses": {str(step): loss for step, loss in progress.losses},
            "hardware": hardware() | {"processes": self._team.size},
        }


def hardware() -> dict[str, Any]:
    """Describe what this process computes with."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
