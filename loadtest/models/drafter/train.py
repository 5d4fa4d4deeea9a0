"""Trains the head on the target's distribution, as it will draft."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from loadtest.models.optimizer import MasterOptimizer

from .chats import Pace, Say, WorkDir, partial
from .corpus import Batch, Corpus
from .head import Eagle3Head, predictable

_SAVE_EVERY_S = 60.0
_WEIGHT_DECAY = 0.01
_ADAM_BETAS = (0.9, 0.95)
_COOL = 0.2


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    Attributes:
        aux_layer_ids: Layers of the target whose input the head reads.
        draft_vocab_size: Tokens that can be drafted.
        step_decay: Weight of a step's loss, over that of the step before.
        batch_tokens: Prompts and padding included.
        peak_lr: Of Muon; Adam has a share of it.
        evaluate_every: Answer tokens between two evaluations.
        seed: Of weights and order.
    """

    aux_layer_ids: tuple[int, ...] = (3, 16, 28)
    draft_vocab_size: int = 8192
    num_steps: int = 3
    step_decay: float = 0.8
    batch_tokens: int = 2048
    peak_lr: float = 2e-3
    adam_share: float = 0.5
    warmup_batches: int = 50
    evaluate_every: int = 200_000
    evaluated_chats: int = 128
    seed: int = 1


class Trainer:
    """A head, its optimizer, and what it has seen."""

    def __init__(self, target: Path, work_dir: WorkDir, recipe: Recipe) -> None:
        """Go on from the newest checkpoint, or begin.

        Raises:
            ValueError: Data is missing, or the checkpoint has another recipe.
        """
        self._work_dir, self._recipe = work_dir, recipe
        training, held_out = (work_dir.ready(held_out=side) for side in (False, True))
        if not training or not held_out:
            raise ValueError(
                f"{work_dir.path} lacks shards with features on one side of the split; "
                "run the commands generate and features first"
            )
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        self._width = model.config.hidden_size
        self._held_out = Corpus(work_dir, held_out[:1], self._width)
        saved = _load_checkpoint(work_dir, recipe)
        if saved is None:
            corpus = Corpus(work_dir, training, self._width)
            common = corpus.common_tokens(recipe.draft_vocab_size)
            self._state = _begin(recipe, training, common)
        else:
            self._state = saved["state"]
        self._vocabulary = torch.tensor(self._state["vocabulary"])
        self._embedding = model.get_input_embeddings().weight.detach()
        output = model.get_output_embeddings().weight.detach()
        self._target_rows = output[self._vocabulary]
        torch.manual_seed(recipe.seed)
        self._head = Eagle3Head(
            model.config, recipe.draft_vocab_size, len(recipe.aux_layer_ids)
        )
        with torch.no_grad():
            # Cooler than the target's own: until it has learnt something, the head is
            # sure of the wrong token.
            self._head.norm.weight.copy_(_COOL * model.model.norm.weight)
            self._head.lm_head.weight.copy_(self._target_rows)
        self._head.bfloat16()
        self._optimizer = MasterOptimizer(
            self._head,
            lambda name: not name.startswith("lm_head"),
            weight_decay=_WEIGHT_DECAY,
            adam_share=recipe.adam_share,
            adam_betas=_ADAM_BETAS,
        )
        if saved is not None:
            self._optimizer.load_state_dict(saved["optimizer"])

    def run(self, num_tokens: int, say: Say) -> None:
        """Train until so many answer tokens have been seen in all, and evaluate.

        The learning rate falls along a cosine to zero at the end. Shards written
        meanwhile come in with the next epoch.
        """
        state, recipe = self._state, self._recipe
        pace = Pace(num_tokens, "tokens", state["tokens_seen"])
        saved_s = time.monotonic()
        while state["tokens_seen"] < num_tokens:
            corpus = Corpus(self._work_dir, state["shards"], self._width)
            plan = corpus.plan(f"{recipe.seed} {state['epoch']}", recipe.batch_tokens)
            for numbers in plan[state["batch"] :]:
                began_s = time.monotonic()
                before = state["tokens_seen"] // recipe.evaluate_every
                seen = self._learn(corpus.load(numbers), self._lr(num_tokens))
                state["tokens_seen"] += seen
                state["batch"] += 1
                state["num_batches"] += 1
                now_s = time.monotonic()
                state["train_s"] += now_s - began_s
                is_last = state["tokens_seen"] >= num_tokens
                if is_last or state["tokens_seen"] // recipe.evaluate_every > before:
                    say(self._evaluate())
                elif now_s - saved_s < _SAVE_EVERY_S:
                    continue
                say(pace.tell(state["tokens_seen"]))
                saved_s = now_s
                self._save()
                if is_last:
                    return
            state["epoch"] += 1
            state["batch"] = 0
            state["shards"] = self._work_dir.ready(held_out=False)

    def _save(self) -> None:
        content = {
            "state": self._state,
            "weights": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        file, curve = self._work_dir.checkpoint, self._work_dir.curve
        torch.save(content, partial(file))
        partial(file).replace(file)
        lines = (json.dumps(point) + "\n" for point in self._state["curve"])
        partial(curve).write_text("".join(lines))
        partial(curve).replace(curve)

    def _lr(self, num_tokens: int) -> float:
        warmup = (self._state["num_batches"] + 1) / self._recipe.warmup_batches
        done = min(1.0, self._state["tokens_seen"] / num_tokens)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return float(self._recipe.peak_lr * min(1.0, warmup) * cosine)

    def _learn(self, batch: Batch, lr: float) -> int:
        weights = self._embedding, self._target_rows
        losses = step_losses(self._head, *weights, batch, self._recipe.num_steps)
        shares = [self._recipe.step_decay**step for step in range(len(losses))]
        loss = sum(share * one for share, one in zip(shares, losses, strict=True))
        (loss / sum(shares)).backward()
        self._optimizer.step(lr)
        self._state["recent"].append([float(one.detach()) for one in losses])
        return int(predictable(batch.answer_of, 1).sum())

    def _evaluate(self) -> str:
        state, recipe = self._state, self._recipe
        recent = torch.tensor(state["recent"])
        state["recent"] = []
        given = self._embedding, self._vocabulary, self._held_out
        limits = recipe.num_steps, recipe.evaluated_chats
        report = evaluate(self._head, *given, *limits)
        state["curve"].append(
            {
                "tokens_seen": state["tokens_seen"],
                "train_s": round(state["train_s"]),
                "num_shards": len(state["shards"]),
                "loss": [round(value, 4) for value in recent.mean(0).tolist()],
                **report,
            }
        )
        accepted = report["temperature_0"]["accepted"]
        return (
            f"{state['tokens_seen']:,} tokens: loss {recent.mean(0)[0]:.3f}, accepted "
            f"at temperature 0 by position {' '.join(f'{p:.3f}' for p in accepted)}"
        )


def step_losses(
    head: Eagle3Head,
    embedding: torch.Tensor,
    target_rows: torch.Tensor,
    batch: Batch,
    num_steps: int,
) -> list[torch.Tensor]:
    """Return each step's mean divergence from the target, over the draft vocabulary.

    `embedding`, [vocabulary, width], is the target's; `target_rows`, [draft, width],
    are its output layer's for the draft vocabulary.
    """
    wanted = (batch.last @ target_rows.T).float().log_softmax(-1)
    states = head.unroll(embedding, batch.token_ids, batch.features, num_steps)
    counted = predictable(batch.answer_of, num_steps)
    losses = []
    for step, (state, rows) in enumerate(zip(states, counted, strict=True)):
        chat, place = rows.nonzero(as_tuple=True)
        drafted = head.lm_head(state[chat, place]).float().log_softmax(-1)
        divergence = functional.kl_div(
            drafted, wanted[chat, place + step + 1], log_target=True, reduction="none"
        )
        losses.append(divergence.sum() / max(1, len(chat)))
    return losses


@torch.no_grad()
def evaluate(
    head: Eagle3Head,
    embedding: torch.Tensor,
    vocabulary: torch.Tensor,
    corpus: Corpus,
    num_steps: int,
    num_chats: int,
) -> dict[str, dict[str, list[float]]]:
    """Compare drafts with what the target wrote, at temperatures 0 and 1.

    A draft that equals the target's own token is accepted; of text sampled at
    temperature 1 that happens as often as verification accepts a one-hot draft.

    Returns:
        By temperature and position the share accepted of the drafts whose forerunners
        were.
    """
    counts = {0.0: torch.zeros(2, num_steps), 1.0: torch.zeros(2, num_steps)}
    numbers = corpus.plan("held out", 1)[:num_chats]
    for batch in (corpus.load(one) for one in numbers):
        drafted_and_kept = counts.get(float(batch.temperatures[0]))
        if drafted_and_kept is None:
            continue
        states = head.unroll(embedding, batch.token_ids, batch.features, num_steps)
        counted = predictable(batch.answer_of, num_steps)
        written = functional.pad(batch.token_ids, (0, num_steps + 1))
        length = batch.token_ids.shape[1]
        for step, state in enumerate(states):
            drafted_and_kept[0, step] += counted[step].sum()
            guess = vocabulary[head.lm_head(state).argmax(-1)]
            counted[step:] &= guess == written[:, step + 2 : step + 2 + length]
            drafted_and_kept[1, step] += counted[step].sum()
    return {
        f"temperature_{temperature:.0f}": {
            "accepted": [
                round(share, 4) for share in (kept / drafted.clamp(min=1)).tolist()
            ]
        }
        for temperature, (drafted, kept) in counts.items()
    }


def _begin(recipe: Recipe, shards: list[int], vocabulary: list[int]) -> dict[str, Any]:
    return {
        "recipe": _plain(recipe),
        "vocabulary": vocabulary,
        "shards": shards,
        **dict.fromkeys(("epoch", "batch", "num_batches", "tokens_seen"), 0),
        "train_s": 0.0,
        "recent": [],
        "curve": [],
    }


def _load_checkpoint(work_dir: WorkDir, recipe: Recipe) -> dict[str, Any] | None:
    if not work_dir.checkpoint.exists():
        return None
    saved: dict[str, Any] = torch.load(work_dir.checkpoint, weights_only=True)
    if saved["state"]["recipe"] != _plain(recipe):
        raise ValueError(
            f"{work_dir.checkpoint} was made with other settings; delete it, or choose "
            "another --work-dir"
        )
    return saved


def _plain(recipe: Recipe) -> dict[str, Any]:
    # Tuples are lists once they have been written.
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return plain
