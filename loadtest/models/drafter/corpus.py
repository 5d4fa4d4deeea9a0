"""Batches of chats with the target's features, in an order that a seed decides."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .chats import Chat, WorkDir, read_shard

_SORTED_TOGETHER = 512


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
    """Shards of chats whose features have been computed."""

    def __init__(self, work_dir: WorkDir, shards: Sequence[int], width: int) -> None:
        """Read the chats; features stay on the disk until they are needed.

        Args:
            work_dir: Holds the shards.
            shards: Which.
            width: Of the target.
        """
        self._width = width
        self._features = {
            shard: np.load(work_dir.features_of(shard), mmap_mode="r")
            for shard in shards
        }
        self._chats: list[tuple[Chat, int, int]] = []
        for shard in shards:
            offset = 0
            for chat in read_shard(work_dir.chats_of(shard)):
                self._chats.append((chat, shard, offset))
                offset += len(chat.token_ids)

    def common_tokens(self, num_tokens: int) -> list[int]:
        """Return the tokens most often answered, in rising order.

        Where there are not as many, the smallest ids fill up, which byte-pair encoding
        has merged first.
        """
        count = Counter(
            token
            for chat, _, _ in self._chats
            for begin, end in chat.answers
            for token in chat.token_ids[begin:end]
        )
        common = [token for token, _ in count.most_common(num_tokens)]
        spare = (token for token in range(1 << 16) if token not in count)
        common += [next(spare) for _ in range(num_tokens - len(common))]
        return sorted(common)

    def plan(self, key: str, batch_tokens: int) -> list[list[int]]:
        """Cut all chats into batches.

        Args:
            key: Seed of the order.
            batch_tokens: Of a batch, padding included; a longer chat stands alone.

        Returns:
            Numbers of chats.
        """
        rng = random.Random(key)
        order = list(range(len(self._chats)))
        rng.shuffle(order)
        batches = []
        for begin in range(0, len(order), _SORTED_TOGETHER):
            together = order[begin : begin + _SORTED_TOGETHER]
            together.sort(key=lambda n: -len(self._chats[n][0].token_ids))
            while together:
                longest = len(self._chats[together[0]][0].token_ids)
                num_chats = max(1, batch_tokens // longest)
                batches.append(together[:num_chats])
                del together[:num_chats]
        rng.shuffle(batches)
        return batches

    def load(self, numbers: Sequence[int]) -> Batch:
        """Read a batch."""
        chats = [self._chats[n] for n in numbers]
        length = max(len(chat.token_ids) for chat, _, _ in chats)
        token_ids = torch.zeros(len(chats), length, dtype=torch.long)
        answer_of = torch.zeros_like(token_ids)
        states: torch.Tensor | None = None
        for row, (chat, shard, offset) in enumerate(chats):
            num_tokens = len(chat.token_ids)
            token_ids[row, :num_tokens] = torch.tensor(chat.token_ids)
            for number, (begin, end) in enumerate(chat.answers, start=1):
                answer_of[row, begin:end] = number
            stored = self._features[shard][offset : offset + num_tokens]
            read = torch.from_numpy(stored.copy()).view(torch.bfloat16)
            if states is None:
                states = read.new_zeros(len(chats), length, read.shape[1])
            states[row, :num_tokens] = read
        assert states is not None
        return Batch(
            token_ids,
            answer_of,
            torch.tensor([chat.temperature for chat, _, _ in chats]),
            states[..., : -self._width],
            states[..., -self._width :],
        )
