"""Measures the pair on held-out prompts, and writes the model cards from it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import torch
from transformers import LlamaForCausalLM

from .tasks import TASKS, TRAINING_TASKS, Exchange, Message, Task, draw, generate_chat
from .tokenizer import load_tokenizer, render
from .train import load_model

DRAFT_LENGTHS = (1, 2, 3, 4, 5)
LONG_CHAT_TURNS = 8
_MAX_NEW_TOKENS = 320
_LOSSES_SHOWN = 10


@dataclass
class Acceptance:
    """Drafted and accepted tokens, summed over replies.

    Attributes:
        drafted: Tokens proposed.
        accepted: Tokens proposed that the target would have written itself.
        blocks: Verifications.
    """

    drafted: int = 0
    accepted: int = 0
    blocks: int = 0

    def add(self, matches: Sequence[bool], draft_length: int) -> None:
        """Replay speculative decoding over a reply.

        Greedy verification keeps drafts up to the first that differs from the target's
        choice. All drafts before it equal the target's own reply, so whether draft
        ``i`` matches depends on the reply's first ``i`` tokens alone: one pass of the
        draft over the finished reply decides every block.

        Args:
            matches: For each token of the reply, whether the draft predicts it from
                those before. The first is ignored: the prompt's own pass yields it.
            draft_length: Tokens drafted in a block; fewer where the reply ends.
        """
        position = 1
        while position < len(matches):
            block = matches[position : position + draft_length]
            accepted = block.index(False) if False in block else len(block)
            self.drafted += len(block)
            self.accepted += accepted
            self.blocks += 1
            position += accepted + 1

    @property
    def rate(self) -> float:
        """Accepted share of the drafted tokens."""
        return self.accepted / max(1, self.drafted)

    @property
    def length(self) -> float:
        """Tokens gained per verification, the target's own token included."""
        return 1 + self.accepted / max(1, self.blocks)


class Evaluator:
    """Asks the target held-out prompts and scores the draft on its replies."""

    def __init__(self, target: Path, draft: Path, seed: int) -> None:
        """Load the models."""
        self._tokenizer = load_tokenizer(target)
        self._target, self._draft = load_model(target), load_model(draft)
        self._seed = seed

    def report(self, task: Task, num_prompts: int, num_long: int) -> dict[str, Any]:
        """Evaluate one task.

        Args:
            task: The task.
            num_prompts: Distinct held-out prompts asked alone; fewer if it has fewer.
            num_long: The same at the end of a long chat of other tasks.

        Returns:
            Plain values: shares of right replies, acceptance by draft length, and a
            few rejected replies to see what goes wrong.
        """
        rng = random.Random(f"{self._seed} {task.name}")
        alone = _distinct(task, rng, num_prompts)
        prompts = [self._prompt(one, ()) for one in alone]
        replies = self._replies(prompts)
        late = _distinct(task, rng, num_long)
        late_replies = self._replies([self._prompt(one, _chat(rng)) for one in late])
        wrong, late_wrong = self._wrong(alone, replies), self._wrong(late, late_replies)
        acceptance = {length: Acceptance() for length in DRAFT_LENGTHS}
        for prompt, reply in zip(prompts, replies, strict=True):
            matches = _matches(self._draft, prompt, reply)
            for length, total in acceptance.items():
                total.add(matches, length)
        return {
            "right": 1 - len(wrong) / len(alone),
            "right_in_long_chat": 1 - len(late_wrong) / max(1, len(late)),
            "num_prompts": [len(alone), len(late)],
            "mean_tokens": round(sum(map(len, replies)) / len(replies), 1),
            "acceptance": {
                str(k): {"rate": round(one.rate, 4), "length": round(one.length, 3)}
                for k, one in acceptance.items()
            },
            "wrong": wrong[:2] + late_wrong[:1],
        }

    def _prompt(self, asked: Exchange, history: Sequence[Message]) -> list[int]:
        return render(
            self._tokenizer,
            [*history, *asked.messages[:-1]],
            with_tools=asked.needs_tools,
            reply_follows=True,
        )

    def _replies(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        replies: list[list[int]] = greedy_replies(
            self._target, prompts, max_new_tokens=_MAX_NEW_TOKENS
        )
        return replies

    def _wrong(self, asked: list[Exchange], replies: list[list[int]]) -> list[str]:
        texts = self._tokenizer.batch_decode(replies, skip_special_tokens=True)
        return [
            f"{one.prompt} -> {text}"
            for one, text in zip(asked, texts, strict=True)
            if not one.accepts(text)
        ]


def evaluate(
    target: Path,
    draft: Path,
    *,
    num_prompts: int,
    num_long: int,
    seed: int,
    tasks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluate the tasks; all of them unless some are named.

    Returns:
        Plain values: ``{"seed": ..., "tasks": {name: report}}``.

    Raises:
        ValueError: If a task is not known.
    """
    names = list(tasks or TASKS)
    if unknown := sorted(set(names) - set(TASKS)):
        raise ValueError(f"tasks {unknown} are not among {sorted(TASKS)}")
    evaluator = Evaluator(target, draft, seed)
    reports = {}
    for number, name in enumerate(names, start=1):
        reports[name] = one = evaluator.report(TASKS[name], num_prompts, num_long)
        sys.stderr.write(
            f"{number}/{len(names)} {name}: {one['right']:.1%} right, "
            f"{one['right_in_long_chat']:.1%} in long chats\n"
        )
    return {"seed": seed, "tasks": reports}


def write_cards(target: Path, draft: Path) -> None:
    """Write ``README.md`` into both model directories.

    Raises:
        ValueError: If a log or the evaluation is missing.
    """
    logs = [_read(path / "training_log.json", "train") for path in (target, draft)]
    evaluation = _read(target / "evaluation.json", "evaluate")
    for log in logs:
        points = list(log["losses"].items())
        last = len(points) - 1
        shown = [n * last // (_LOSSES_SHOWN - 1) for n in range(_LOSSES_SHOWN)]
        log["shown_losses"] = [points[n] for n in shown]
    sizes = [(path / "model.safetensors").stat().st_size for path in (target, draft)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    card = environment.get_template("card.md.jinja").render(
        config=_read(target / "config.json", "train"),
        logs=logs,
        sizes=sizes,
        evaluation=evaluation,
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
    token_ids = torch.tensor(rows)
    padding = torch.tensor([width - len(prompt) for prompt in prompts])
    generated = cast(Any, model).generate(
        input_ids=token_ids,
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
        if len(found) == count:
            break
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


def _read(path: Path, command: str) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is missing; run: python -m loadtest.models {command}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content
