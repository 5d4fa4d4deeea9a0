"""Measures the pair on held-out prompts, and writes the model cards from it."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM

from .describe import load_template
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
    """Write the target's ``evaluation.json``: for each task what `_report` finds."""
    pair = load_tokenizer(target), load_model(target), load_model(draft)
    reports: dict[str, Any] = {}
    for name, task in TASKS.items():
        reports[name] = one = _report(task, *pair)
        sys.stderr.write(
            f"{len(reports)}/{len(TASKS)} {name}: {one['right']:.1%} right, "
            f"{one['right_in_long_chat']:.1%} in long chats\n"
        )
    report = {"seed": _SEED, "tasks": reports}
    (target / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


def _report(
    task: Task, tokenizer: Any, target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> dict[str, Any]:
    """Return shares of right replies to held-out prompts, and acceptance by length.

    Prompts are asked alone, and at the end of a long chat of other tasks.
    """
    rng = random.Random(f"{_SEED} {task.name}")

    def ask(
        asked: Sequence[Exchange], histories: Iterable[Sequence[Message]]
    ) -> tuple[list[list[int]], list[list[int]], float]:
        """Return prompts, replies, and the share of right ones."""
        prompts = [
            render(
                tokenizer,
                [*history, *one.messages[:-1]],
                with_tools=one.needs_tools,
                reply_follows=True,
            )
            for one, history in zip(asked, histories, strict=False)
        ]
        replies = greedy_replies(target, prompts, max_new_tokens=_MAX_NEW_TOKENS)
        texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
        right = [one.accepts(text) for one, text in zip(asked, texts, strict=True)]
        return prompts, replies, sum(right) / max(1, len(right))

    alone = _distinct(task, rng, _NUM_PROMPTS)
    prompts, replies, right = ask(alone, itertools.repeat(()))
    late = _distinct(task, rng, _NUM_LONG)
    _, _, late_right = ask(late, [_chat(rng) for _ in late])
    matches = [_matches(draft, *pair) for pair in zip(prompts, replies, strict=True)]
    return {
        "right": right,
        "right_in_long_chat": late_right,
        "num_prompts": [len(alone), len(late)],
        "mean_tokens": round(sum(map(len, replies)) / len(replies), 1),
        "acceptance": {str(k): acceptance(matches, k) for k in DRAFT_LENGTHS},
    }


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
    logs = [_read(path / "training_log.json") for path in (target, draft)]
    for log in logs:
        points = list(log["losses"].items())
        last = len(points) - 1
        shown = [n * last // (_LOSSES_SHOWN - 1) for n in range(_LOSSES_SHOWN)]
        log["shown_losses"] = [points[n] for n in shown]
    card = load_template(Path(__file__).with_name("card.md.jinja")).render(
        config=_read(target / "config.json"),
        logs=logs,
        sizes=[(p / "model.safetensors").stat().st_size for p in (target, draft)],
        evaluation=_read(target / "evaluation.json"),
        tasks=TASKS,
        practised=[task.name for task in TRAINING_TASKS if task.practice_only],
        draft_lengths=DRAFT_LENGTHS,
        turns=LONG_CHAT_TURNS,
    )
    (target / "README.md").write_text(card)
    (draft / "README.md").write_text(
        "# Demo pair: draft\n\nDraft model for `../demo-target`, with the same "
        "tokenizer. Data, training, acceptance\nand limits are in "
        "[the target's card](../demo-target/README.md).\n"
    )


@torch.inference_mode()
def greedy_replies(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[list[int]]:
    """Decode many prompts greedily until the end-of-turn token, which is kept."""
    config = model.generation_config
    pad, end = config.pad_token_id, config.eos_token_id
    width = max(map(len, prompts), default=0)
    rows = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    padding = torch.tensor([width - len(prompt) for prompt in prompts])
    generated = cast(Any, model).generate(
        input_ids=torch.tensor(rows),
        attention_mask=(torch.arange(width) >= padding[:, None]).long(),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    replies: list[list[int]] = generated[:, width:].tolist()
    return [one[: one.index(end) + 1] if end in one else one for one in replies]


def _distinct(task: Task, rng: random.Random, count: int) -> list[Exchange]:
    """Draw up to ``count`` exchanges with different held-out prompts."""
    found: dict[str, Exchange] = {}
    for _ in range(3 * count):
        if len(found) < count:
            drawn = draw(task, rng, held_out=True)
            found.setdefault(drawn.prompt, drawn)
    return list(found.values())


def _chat(rng: random.Random) -> tuple[Message, ...]:
    plain = [task for task in TASKS.values() if not task.name.startswith("tool_")]
    return generate_chat(plain, rng, num_turns=LONG_CHAT_TURNS).messages


@torch.inference_mode()
def _matches(
    draft: LlamaForCausalLM, prompt: list[int], reply: list[int]
) -> list[bool]:
    """Tell for each token of the reply whether the draft predicts it."""
    logits = draft(input_ids=torch.tensor([prompt + reply[:-1]])).logits[0]
    predicted = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return [guess == token for guess, token in zip(predicted, reply, strict=True)]


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
