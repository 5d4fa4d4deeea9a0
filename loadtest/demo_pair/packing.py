"""Training batches: chats rendered to tokens and packed into rows."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from .recipe import Phase, Recipe
from .tasks import TOOL_TASKS, TRAINING_TASKS, generate_chat
from .tokenizer import TURN_END, TURN_START, render

_TOOL_NAMES = frozenset(task.name for task in TOOL_TASKS)
_TOOL_ROW = 512


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

    Each row starts with a fresh chat and is cut at its end. Chats in a row see
    each other: to the model the row is one long conversation, which is the
    habit that a long multi-turn prompt needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        """Prepare to pack chats for ``recipe``."""
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._tasks = TRAINING_TASKS
        self._plain = tuple(t for t in self._tasks if t.name not in _TOOL_NAMES)
        self._start = tokenizer.convert_tokens_to_ids(TURN_START)
        self._end = tokenizer.convert_tokens_to_ids(TURN_END)
        self._assistant = tokenizer.encode("assistant\n", add_special_tokens=False)

    def batch(self, step: int) -> Batch:
        """Return the batch of ``step``, the same on every call."""
        rng = random.Random(f"{self._recipe.seed} {self._recipe.name} {step}")
        phase = self._recipe.phase_at(step)
        rows, weights = [], []
        for number in range(phase.num_rows):
            if number < phase.num_repeats:
                row, weight = self._repeat(rng, phase)
            else:
                row = self._row(rng, phase)
                weight = self._weights(row)
            rows.append(row)
            weights.append(weight)
        return Batch(torch.tensor(rows), torch.tensor(weights)[:, 1:])

    def _repeat(
        self, rng: random.Random, phase: Phase
    ) -> tuple[list[int], list[float]]:
        """Write random tokens over and over; only their first writing costs nothing."""
        period = rng.randint(phase.row_length // 8, phase.row_length // 2)
        once = rng.choices(range(len(self._tokenizer)), k=period)
        length = phase.row_length + 1
        row = (once * (length // period + 1))[:length]
        return row, [0.0] * period + [1.0] * (length - period)

    def _row(self, rng: random.Random, phase: Phase) -> list[int]:
        row: list[int] = []
        # A list of tools alone would fill a short row.
        tasks = self._tasks if phase.row_length >= _TOOL_ROW else self._plain
        while len(row) <= phase.row_length:
            chat = generate_chat(tasks, rng)
            row += render(self._tokenizer, chat.messages, with_tools=bool(chat.tools))
        return row[: phase.row_length + 1]

    def _weights(self, row: list[int]) -> list[float]:
        """Weight 1 from an assistant turn's first word to its end-of-turn token."""
        weights = [self._recipe.prompt_weight] * len(row)
        opening = [self._start, *self._assistant]
        inside = False
        for position, token in enumerate(row):
            if inside:
                weights[position] = 1.0
            before = row[max(0, position + 1 - len(opening)) : position + 1]
            inside = before == opening or (inside and token != self._end)
        return weights
