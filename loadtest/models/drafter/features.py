"""What a head learns from, computed once and read in batches.

One array a shard, [tokens, 4 x width]: the target's hidden states before the layers
that the head reads, and the last state, of which the output layer makes the target's
distribution. bfloat16, which NumPy does not know, is kept as int16. A GPU computes them
again faster than a disk would give them, and keeps none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from .chats import Chat, Say, WorkDir, cut_by_length, read_shard, replacing

_BATCH_TOKENS = 2048
_SORTED_TOGETHER = 512


def compute_features(
    target: Path, work_dir: WorkDir, aux_layer_ids: tuple[int, ...], say: Say
) -> None:
    """Write the features of every shard that has none yet."""
    missing = [n for n in work_dir.shards() if not work_dir.features_of(n).exists()]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    for done, shard in enumerate(missing, start=1):
        chats = read_shard(work_dir.chats_of(shard))
        features = _features_of(model, chats, aux_layer_ids)
        with replacing(work_dir.features_of(shard)) as opened:
            np.save(opened, features.view(torch.int16).numpy())
        say(f"shard {shard} has features, {len(missing) - done} have none yet")


@torch.inference_mode()
def _features_of(
    model: Any, chats: list[Chat], aux_layer_ids: tuple[int, ...]
) -> torch.Tensor:
    rows: dict[int, torch.Tensor] = {}
    for batch in cut_by_length(chats, range(len(chats)), _BATCH_TOKENS):
        # What pads a row stands at its end, where no token sees it.
        tokens = [torch.tensor(chats[n].token_ids) for n in batch]
        joined = run_target(
            model, pad_sequence(tokens, batch_first=True), aux_layer_ids
        )
        rows |= {n: joined[row, : len(tokens[row])] for row, n in enumerate(batch)}
    return torch.cat([rows[n] for n in range(len(chats))])


@torch.no_grad()
def run_target(
    model: Any, token_ids: torch.Tensor, aux_layer_ids: Sequence[int]
) -> torch.Tensor:
    """Return what the head learns from, [chats, length, (features + 1) x width]."""
    out = model.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
    states = [out.hidden_states[n] for n in aux_layer_ids] + [out.last_hidden_state]
    return torch.cat(states, dim=-1)


@dataclass(frozen=True)
class Batch:
    """Chats of similar length, padded at the end.

    Attributes:
        token_ids: [chats, length].
        answer_of: [chats, length]: number of a token's answer, from 1; else 0.
        temperatures: [chats], of the answers.
        features: [chats, length, features x width], bfloat16: what the head reads.
        last: [chats, length, width], bfloat16: what the target's output layer reads.
    """

    token_ids: torch.Tensor
    answer_of: torch.Tensor
    temperatures: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor


class Corpus:
    """Shards of chats, and what the target computes for them."""

    def __init__(
        self,
        work_dir: WorkDir,
        shards: Sequence[int],
        target: Any,
        aux_layer_ids: Sequence[int],
        *,
        from_disk: bool,
    ) -> None:
        """Read the chats; features stay on the disk, or the target computes them."""
        self._target, self._layers = target, aux_layer_ids
        self._chats: list[Chat] = []
        self._states: list[NDArray[np.int16]] = []
        for shard in shards:
            chats = read_shard(work_dir.chats_of(shard))
            self._chats += chats
            if from_disk:
                states = np.load(work_dir.features_of(shard), mmap_mode="r")
                ends = np.cumsum([len(chat.token_ids) for chat in chats], dtype=int)
                self._states += np.split(states, ends)[:-1]

    @property
    def size(self) -> dict[str, int]:
        """How many chats there are, and tokens that were answered."""
        answers = [span for chat in self._chats for span in chat.answers]
        return {
            "num_chats": len(self._chats),
            "num_answer_tokens": sum(end - begin for begin, end in answers),
        }

    def common_tokens(self, num_tokens: int) -> list[int]:
        """Return the tokens most often answered, in rising order.

        Of those answered equally often, or never, the smallest ids come first, which
        byte-pair encoding has merged first.
        """
        answered = [
            token
            for chat in self._chats
            for begin, end in chat.answers
            for token in chat.token_ids[begin:end]
        ]
        counts = np.bincount(answered, minlength=1 << 16)
        return sorted(np.argsort(-counts, kind="stable")[:num_tokens].tolist())

    def plan(self, key: str, batch_tokens: int) -> list[list[int]]:
        """Cut the numbers of all chats into batches, in an order that the key seeds."""
        rng = random.Random(key)
        order = list(range(len(self._chats)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for begin in range(0, len(order), _SORTED_TOGETHER):
            together = order[begin : begin + _SORTED_TOGETHER]
            batches += cut_by_length(self._chats, together, batch_tokens)
        rng.shuffle(batches)
        return batches

    def load(self, numbers: Sequence[int]) -> Batch:
        """Read a batch."""
        chats = [self._chats[n] for n in numbers]
        rows = [torch.tensor(chat.token_ids) for chat in chats]
        token_ids = pad_sequence(rows, batch_first=True)
        answer_of = torch.zeros_like(token_ids)
        for row, chat in enumerate(chats):
            for number, (begin, end) in enumerate(chat.answers, start=1):
                answer_of[row, begin:end] = number
        device, width = self._target.device, self._target.config.hidden_size
        token_ids = token_ids.to(device)
        if self._states:
            read = [torch.from_numpy(np.array(self._states[n])) for n in numbers]
            states = pad_sequence(read, batch_first=True).view(torch.bfloat16)
        else:
            states = run_target(self._target, token_ids, self._layers)
        return Batch(
            token_ids,
            answer_of.to(device),
            torch.tensor([chat.temperature for chat in chats], device=device),
            states[..., :-width],
            states[..., -width:],
        )
