"""Measures the pair on held-out prompts, and writes the model cards from it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .describe import EVALUATION, LOG, write_card, write_json
from .tasks import TASKS, TRAINING_TASKS, Exchange, Message, Task, draw, generate_chat
from .tokenizer import load_tokenizer, render
from .train import load_model

DRAFT_LENGTHS = (1, 2, 3, 4, 5)
LONG_CHAT_TURNS = 8
_SEED = 3
_NUM_PROMPTS, _NUM_LONG = 100, 20
_MAX_NEW_TOKENS = 320
_LOSSES_SHOWN = 10


def evaluate(target: Path, draft: Path) -> None:
    """Write the target's ``evaluation.json``.

    For each task acceptance by draft length on held-out prompts, and if it has one
    right answer the shares that are right, asked alone and at the end of a long chat.
    """
    pair = load_tokenizer(target), load_model(target), load_model(draft)
    reports: dict[str, Any] = {}
    for name, task in TASKS.items():
        sys.stderr.write(f"{name}\n")
        reports[name] = _report(task, *pair)
    write_json(target / EVALUATION, {"seed": _SEED, "tasks": reports})


def _report(task: Task, tokenizer: Any, target: Any, draft: Any) -> dict[str, Any]:
    rng = random.Random(f"{_SEED} {task.name}")
    plain = [one for one in TASKS.values() if not one.name.startswith("tool_")]
    alone = _distinct(task, rng, _NUM_PROMPTS)
    prompts, replies, right = ask(target, tokenizer, alone)
    late = _distinct(task, rng, _NUM_LONG)
    chats = [generate_chat(plain, rng, num_turns=LONG_CHAT_TURNS) for _ in late]
    *_, late_right = ask(target, tokenizer, late, [chat.messages for chat in chats])
    matches = [_matches(draft, *pair) for pair in zip(prompts, replies, strict=True)]
    return {
        "right": right if task.one_right_answer else None,
        "right_in_long_chat": late_right if task.one_right_answer else None,
        "num_prompts": [len(alone), len(late)],
        "mean_tokens": round(sum(map(len, replies)) / len(replies), 1),
        "acceptance": {str(k): acceptance(matches, k) for k in DRAFT_LENGTHS},
    }


def _distinct(task: Task, rng: random.Random, count: int) -> list[Exchange]:
    """Draw up to ``count`` exchanges with different held-out prompts."""
    drawn = (draw(task, rng, held_out=True) for _ in range(3 * count))
    return list({one.prompt: one for one in drawn}.values())[:count]


@torch.inference_mode()
def ask(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Exchange],
    histories: Sequence[Sequence[Message]] | None = None,
) -> tuple[list[list[int]], list[list[int]], float]:
    """Have questions answered greedily, each at the end of its history if it has one.

    Returns:
        Token ids of prompts and replies, which end with the end-of-turn token, and the
        share of replies that are the reference.
    """
    prompts = [
        render(
            tokenizer,
            [*history, *one.messages[:-1]],
            with_tools=one.needs_tools,
            reply_follows=True,
        )
        for one, history in zip(asked, histories or [()] * len(asked), strict=True)
    ]
    padded = tokenizer.pad(
        {"input_ids": prompts}, padding_side="left", return_tensors="pt"
    )
    output = model.generate(**padded, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)
    rows = output[:, padded["input_ids"].shape[1] :].tolist()
    replies = [[n for n in row if n != tokenizer.pad_token_id] for row in rows]
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    right = [one.answer == text.strip() for one, text in zip(asked, texts, strict=True)]
    return prompts, replies, sum(right) / len(right)


@torch.inference_mode()
def _matches(draft: Any, prompt: list[int], reply: list[int]) -> list[bool]:
    """Tell for each token of the reply whether the draft predicts it."""
    logits = draft(input_ids=torch.tensor([prompt + reply[:-1]])).logits[0]
    predicted = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return [guess == token for guess, token in zip(predicted, reply, strict=True)]


def acceptance(matches: Sequence[Sequence[bool]], draft_length: int) -> dict[str, Any]:
    """Replay speculative decoding over finished replies.

    Greedy verification keeps drafts up to the first that is not the target's choice, so
    all before it are the reply's own: it is enough to know of each token whether the
    draft predicts it from those before. The prompt's own pass yields the first.

    Returns:
        ``rate``, the accepted share of the drafted tokens, and ``length``, the tokens
        gained per verification, the target's own included.
    """
    drafted = accepted = num_blocks = 0
    for reply in matches:
        position = 1
        while position < len(reply):
            block = list(reply[position : position + draft_length])
            kept = block.index(False) if False in block else len(block)
            drafted += len(block)
            accepted += kept
            num_blocks += 1
            position += kept + 1
    return {
        "rate": round(accepted / max(1, drafted), 4),
        "length": round(1 + accepted / max(1, num_blocks), 3),
    }


def write_cards(target: Path, draft: Path) -> None:
    """Write ``README.md`` into both model directories."""
    logs = [_read(path / LOG) for path in (target, draft)]
    for log in logs:
        points = list(log["losses"].items())
        places = (n * (len(points) - 1) for n in range(_LOSSES_SHOWN))
        log["shown_losses"] = [points[n // (_LOSSES_SHOWN - 1)] for n in places]
    write_card(
        target,
        Path(__file__).with_name("card.md.jinja"),
        config=_read(target / "config.json"),
        logs=logs,
        sizes=[(p / "model.safetensors").stat().st_size for p in (target, draft)],
        evaluation=_read(target / EVALUATION),
        tasks=TASKS,
        practised=[task.name for task in TRAINING_TASKS if task.practice_only],
        draft_lengths=DRAFT_LENGTHS,
        turns=LONG_CHAT_TURNS,
    )
    (draft / "README.md").write_text(
        "# Demo pair: draft\n\nDraft model for `../demo-target`, with the same "
        "tokenizer. Data, training, acceptance\nand limits are in "
        "[the target's card](../demo-target/README.md).\n"
    )


def _read(path: Path) -> Any:
    return json.loads(path.read_text())
