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

from loadtest.models.describe import describe_hardware
from loadtest.models.optimizer import MasterOptimizer

from .chats import Say, WorkDir, replacing
from .features import Batch, Corpus
from .head import Eagle3Head, predictable
from .small import SmallModel

_SAVE_EVERY_S = 60.0
_COOL = 0.2


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained.

    Attributes:
        method: What vLLM calls it, a key of `RECIPES`.
        aux_layer_ids: Layers of the target whose input the head reads.
        draft_vocab_size: Tokens that can be drafted; a draft model's are the target's.
        width: Of a draft model: 29 MB in bfloat16 with SmolLM2's tokens.
        step_decay: Weight of a step's loss, over that of the step before.
        batch_tokens: Prompts and padding included.
        peak_lr: Of Muon; Adam has a share of it.
        evaluate_every: Answer tokens between two evaluations.
        seed: Of weights and order.
    """

    method: str = "eagle3"
    aux_layer_ids: tuple[int, ...] = (3, 16, 28)
    draft_vocab_size: int = 8192
    width: int = 256
    num_steps: int = 4
    step_decay: float = 0.8
    batch_tokens: int = 16_384
    peak_lr: float = 3e-3
    adam_share: float = 0.5
    warmup_batches: int = 100
    evaluate_every: int = 1_000_000
    seed: int = 1


RECIPES = {
    recipe.method: recipe
    for recipe in (
        Recipe(),
        # Has no features to go wrong by: what it is fed is what it will be fed.
        Recipe("draft_model", draft_vocab_size=49_152, num_steps=1, batch_tokens=8192),
    )
}


class Trainer:
    """A head, its optimizer, and what it has seen."""

    def __init__(self, target: Path, work_dir: WorkDir, recipe: Recipe) -> None:
        """Go on from the newest checkpoint, or begin.

        Raises:
            ValueError: Data is missing, or the checkpoint has another recipe.
        """
        self._work_dir, self._recipe = work_dir, recipe
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        training, held_out = (self._shards(held_out=side) for side in (False, True))
        if not training or not held_out:
            raise ValueError(
                f"{work_dir.path} lacks shards with features on one side of the split; "
                "run the commands generate and features first"
            )
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        self._target = model.to(self._device).eval()
        self._held_out = self._corpus(held_out[:1])
        saved: dict[str, Any] | None = None
        if work_dir.checkpoint.exists():
            saved = torch.load(
                work_dir.checkpoint, map_location=self._device, weights_only=True
            )
        self._state = saved["state"] if saved else self._begin(training)
        # When it is evaluated changes nothing of what comes out.
        if self._state["recipe"] | {"evaluate_every": recipe.evaluate_every} != asdict(
            recipe
        ):
            raise ValueError(
                f"{work_dir.checkpoint} was made with other settings; delete it, or "
                "choose another --work-dir"
            )
        self._vocabulary = torch.tensor(self._state["vocabulary"], device=self._device)
        self._embedding = model.get_input_embeddings().weight.detach()
        output = model.get_output_embeddings().weight.detach()
        self._target_rows = output[self._vocabulary]
        torch.manual_seed(recipe.seed)
        self._head = self._make_head(model).to(self._device, torch.bfloat16)
        self._optimizer = MasterOptimizer(
            self._head,
            lambda name: not name.startswith(("lm_head", "model.embed_tokens")),
            weight_decay=0.01,
            adam_share=recipe.adam_share,
            adam_betas=(0.9, 0.95),
        )
        if saved:
            self._optimizer.load_state_dict(saved["optimizer"])

    def _shards(self, *, held_out: bool) -> list[int]:
        on_disk = self._device.type == "cpu"
        return self._work_dir.ready(held_out=held_out, with_features=on_disk)

    def _corpus(self, shards: list[int]) -> Corpus:
        layers, on_disk = self._recipe.aux_layer_ids, self._device.type == "cpu"
        return Corpus(self._work_dir, shards, self._target, layers, from_disk=on_disk)

    def _make_head(self, target: Any) -> Eagle3Head | SmallModel:
        """Make a drafter that begins with what it can take of the target.

        Its logits are smaller than the target's: until it has learnt something, it is
        sure of the wrong token.
        """
        recipe, norm = self._recipe, target.model.norm.weight
        if recipe.method == "draft_model":
            small = SmallModel(target.config, recipe.width)
            small.begin_as(self._target_rows, norm, _COOL)
            return small
        num_features = len(recipe.aux_layer_ids)
        head = Eagle3Head(target.config, recipe.draft_vocab_size, num_features)
        with torch.no_grad():
            head.norm.weight.copy_(_COOL * norm)
            head.lm_head.weight.copy_(self._target_rows)
        return head

    def _begin(self, shards: list[int]) -> dict[str, Any]:
        corpus = self._corpus(shards)
        return {
            "recipe": asdict(self._recipe),
            "hardware": describe_hardware(self._device.type),
            **corpus.size,
            "vocabulary": corpus.common_tokens(self._recipe.draft_vocab_size),
            "shards": shards,
            **dict.fromkeys(("epoch", "batch", "num_batches", "tokens_seen"), 0),
            "train_s": 0.0,
            "recent": [],
            "curve": [],
        }

    def run(self, num_tokens: int, say: Say) -> None:
        """Train until so many answer tokens have been seen in all, and evaluate.

        The learning rate falls along a cosine to zero at the end. Shards written
        meanwhile come in with the next epoch.
        """
        state, recipe = self._state, self._recipe
        saved_s = time.monotonic()
        while state["tokens_seen"] < num_tokens:
            corpus = self._corpus(state["shards"])
            state |= corpus.size
            plan = corpus.plan(f"{recipe.seed} {state['epoch']}", recipe.batch_tokens)
            for numbers in plan[state["batch"] :]:
                began_s = time.monotonic()
                before = state["tokens_seen"] // recipe.evaluate_every
                state["tokens_seen"] += self._learn(corpus.load(numbers), num_tokens)
                state["batch"] += 1
                state["num_batches"] += 1
                now_s = time.monotonic()
                state["train_s"] += now_s - began_s
                is_last = state["tokens_seen"] >= num_tokens
                if is_last or state["tokens_seen"] // recipe.evaluate_every > before:
                    say(self._evaluate())
                elif now_s - saved_s < _SAVE_EVERY_S:
                    continue
                done = state["tokens_seen"] / num_tokens
                left_h = state["train_s"] * (1 / done - 1) / 3600
                say(f"{done:.1%} of {num_tokens:,} tokens, {left_h:.1f} h left")
                saved_s = now_s
                self._save()
                if is_last:
                    return
            state["epoch"] += 1
            state["batch"] = 0
            state["shards"] = self._shards(held_out=False)

    def _save(self) -> None:
        content = {
            "state": self._state,
            "weights": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._work_dir.checkpoint) as opened:
            torch.save(content, opened)
        lines = (json.dumps(point) + "\n" for point in self._state["curve"])
        with replacing(self._work_dir.curve) as opened:
            opened.write("".join(lines).encode())

    def _learn(self, batch: Batch, num_tokens: int) -> int:
        """Take a step; return how many answer tokens were seen."""
        state, recipe = self._state, self._recipe
        losses, _ = self._compare(batch)
        shares = [recipe.step_decay**step for step in range(len(losses))]
        loss = sum(share * one for share, one in zip(shares, losses, strict=True))
        (loss / sum(shares)).backward()
        warmup = min(1.0, (state["num_batches"] + 1) / recipe.warmup_batches)
        cosine = (1 + math.cos(math.pi * state["tokens_seen"] / num_tokens)) / 2
        self._optimizer.step(recipe.peak_lr * warmup * cosine)
        state["recent"].append([float(one.detach()) for one in losses])
        return int(predictable(batch.answer_of, 1).sum())

    def _compare(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Draft for a batch, and compare with the target and with what it wrote.

        A draft that equals the target's own token is accepted; of text sampled at
        temperature 1 that happens as often as verification accepts a one-hot draft.

        Returns:
            Each step's mean divergence from the target's distribution, over the draft
            vocabulary; and how many drafts of a chat were made and accepted, [chats, 2,
            steps], of those whose forerunners were accepted.
        """
        num_steps = self._recipe.num_steps
        wanted = (batch.last @ self._target_rows.T).float().log_softmax(-1)
        given = self._embedding, batch.token_ids, batch.features
        states = self._head.unroll(*given, num_steps)
        counted = predictable(batch.answer_of, num_steps)
        is_alive = counted[0].clone()
        losses, counts = [], torch.zeros(len(counted[0]), 2, num_steps)
        for step, (state, rows) in enumerate(zip(states, counted, strict=True)):
            chat, place = rows.nonzero(as_tuple=True)
            drafted = self._head.lm_head(state[chat, place]).float().log_softmax(-1)
            own = wanted[chat, place + step + 1]
            divergence = functional.kl_div(
                drafted, own, log_target=True, reduction="none"
            )
            losses.append(divergence.sum() / max(1, len(chat)))
            guess = self._vocabulary[drafted.argmax(-1)]
            is_alive &= rows
            reached = is_alive.sum(1)
            is_alive[chat, place] &= guess == batch.token_ids[chat, place + step + 2]
            counts[:, :, step] = torch.stack([reached, is_alive.sum(1)], dim=1)
        return losses, counts

    def _evaluate(self) -> str:
        """Note how the head does on held-out chats, and return a line about it."""
        state, recipe = self._state, self._recipe
        counts = {
            temperature: torch.zeros(2, recipe.num_steps) for temperature in (0, 1)
        }
        for numbers in self._held_out.plan("held out", recipe.batch_tokens):
            batch = self._held_out.load(numbers)
            with torch.no_grad():
                of_chats = self._compare(batch)[1]
            for temperature, count in counts.items():
                count += of_chats[(batch.temperatures == temperature).cpu()].sum(0)
        accepted = {
            temperature: [round(one, 4) for one in (kept / made.clamp(min=1)).tolist()]
            for temperature, (made, kept) in counts.items()
        }
        losses = torch.tensor(state["recent"]).mean(0).tolist()
        state["recent"] = []
        state["curve"].append(
            {
                "tokens_seen": state["tokens_seen"],
                "train_s": round(state["train_s"]),
                "num_shards": len(state["shards"]),
                "loss": [round(loss, 4) for loss in losses],
                **{f"temperature_{t}": {"accepted": a} for t, a in accepted.items()},
            }
        )
        shares = " ".join(f"{share:.3f}" for share in accepted[0])
        return f"loss {losses[0]:.3f}, accepted at temperature 0 by position {shares}"
