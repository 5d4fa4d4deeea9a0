"""Measures the pair on held-out prompts: right answers and draft acceptance."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .generation import greedy_replies
from .tasks import TASKS, Exchange, Task, draw, generate_chat
from .tokenizer import load_tokenizer, render
from .train import load_model

DRAFT_LENGTHS = (1, 2, 3, 4, 5)
LONG_CHAT_TURNS = 8
_MAX_NEW_TOKENS = 320


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

    @property
    def rate(self) -> float:
        """Accepted share of the drafted tokens."""
        return self.accepted / max(1, self.drafted)

    @property
    def length(self) -> float:
        """Tokens gained per verification, the target's own token included."""
        return 1 + self.accepted / max(1, self.blocks)


@dataclass
class TaskReport:
    """Results of one task.

    Attributes:
        right: Share of held-out prompts whose greedy reply the checker accepts.
        right_in_long_chat: The same after eight earlier turns of other tasks.
        num_prompts: Prompts alone, and prompts at the end of a long chat.
        mean_tokens: Mean reply length.
        acceptance: Draft length to acceptance.
        wrong: A few rejected replies, to see what goes wrong.
    """

    right: float
    right_in_long_chat: float
    num_prompts: tuple[int, int]
    mean_tokens: float
    acceptance: dict[int, Acceptance]
    wrong: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, rounded."""
        plain = asdict(self) | {"acceptance": {}}
        for length, acceptance in self.acceptance.items():
            plain["acceptance"][str(length)] = {
                "rate": round(acceptance.rate, 4),
                "length": round(acceptance.length, 3),
            }
        return plain | {"mean_tokens": round(self.mean_tokens, 1)}


def accept_blocks(matches: Sequence[bool], draft_length: int) -> Acceptance:
    """Replay speculative decoding over a reply.

    Greedy verification keeps drafts up to the first that differs from the
    target's choice. All drafts before it equal the target's own reply, so whether
    draft ``i`` matches depends on the reply's first ``i`` tokens alone: one pass of
    the draft over the finished reply decides every block.

    Args:
        matches: For each token of the reply, whether the draft predicts it from
            those before. The first is ignored: the prompt's own pass yields it.
        draft_length: Tokens drafted in a block; fewer where the reply ends.

    Returns:
        The sums over all blocks.
    """
    total = Acceptance()
    position = 1
    while position < len(matches):
        block = matches[position : position + draft_length]
        accepted = block.index(False) if False in block else len(block)
        total.drafted += len(block)
        total.accepted += accepted
        total.blocks += 1
        position += accepted + 1
    return total


class Evaluator:
    """Asks the target held-out prompts and scores the draft on its replies."""

    def __init__(self, target: Path, draft: Path | None, seed: int) -> None:
        """Load the models; without a draft only right answers are counted."""
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(target)
        self._target = load_model(target)
        self._draft = load_model(draft) if draft else None
        self._seed = seed

    def report(self, task: Task, *, num_prompts: int, num_long: int) -> TaskReport:
        """Evaluate one task.

        Args:
            task: The task.
            num_prompts: Distinct held-out prompts asked alone (fewer if the task
                has fewer).
            num_long: Prompts asked at the end of a long chat.

        Returns:
            The task's results.
        """
        rng = random.Random(f"{self._seed} {task.name}")
        alone = _distinct(task, rng, num_prompts)
        prompts = [self._prompt(asked, ()) for asked in alone]
        replies = greedy_replies(self._target, prompts, max_new_tokens=_MAX_NEW_TOKENS)
        wrong = self._wrong(alone, replies)
        late = _distinct(task, rng, num_long)
        long_prompts = [self._prompt(asked, self._history(rng)) for asked in late]
        late_replies = greedy_replies(
            self._target, long_prompts, max_new_tokens=_MAX_NEW_TOKENS
        )
        late_wrong = self._wrong(late, late_replies)
        return TaskReport(
            right=1 - len(wrong) / len(alone),
            right_in_long_chat=1 - len(late_wrong) / max(1, len(late)),
            num_prompts=(len(alone), len(late)),
            mean_tokens=sum(map(len, replies)) / len(replies),
            acceptance=self._acceptance(prompts, replies),
            wrong=wrong[:2] + late_wrong[:1],
        )

    def _history(self, rng: random.Random) -> tuple[dict[str, Any], ...]:
        plain = [task for task in TASKS.values() if not task.name.startswith("tool_")]
        return generate_chat(plain, rng, num_turns=LONG_CHAT_TURNS).messages

    def _prompt(
        self, asked: Exchange, history: tuple[dict[str, Any], ...]
    ) -> list[int]:
        messages = [*history, *asked.messages[:-1]]
        return render(
            self._tokenizer,
            messages,
            with_tools=asked.needs_tools,
            reply_follows=True,
        )

    def _wrong(self, asked: list[Exchange], replies: list[list[int]]) -> list[str]:
        texts = self._tokenizer.batch_decode(replies, skip_special_tokens=True)
        return [
            f"{one.prompt} -> {text}"
            for one, text in zip(asked, texts, strict=True)
            if not one.accepts(text)
        ]

    def _acceptance(
        self, prompts: list[list[int]], replies: list[list[int]]
    ) -> dict[int, Acceptance]:
        if self._draft is None:
            return {}
        totals = {length: Acceptance() for length in DRAFT_LENGTHS}
        for prompt, reply in zip(prompts, replies, strict=True):
            matches = _matches(self._draft, prompt, reply)
            for length, total in totals.items():
                one = accept_blocks(matches, length)
                total.drafted += one.drafted
                total.accepted += one.accepted
                total.blocks += one.blocks
        return totals


def evaluate(
    target: Path,
    draft: Path | None,
    *,
    num_prompts: int,
    num_long: int,
    seed: int,
    tasks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluate the tasks.

    Args:
        target: Directory of the target.
        draft: Directory of the draft; None leaves acceptance out.
        num_prompts: Held-out prompts per task, asked alone.
        num_long: Held-out prompts per task, asked at the end of a long chat.
        seed: Seed of the prompts.
        tasks: Names of the tasks; all by default.

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
        task = TASKS[name]
        report = evaluator.report(task, num_prompts=num_prompts, num_long=num_long)
        reports[name] = report.as_dict()
        sys.stderr.write(f"{number}/{len(names)} {_summary(task, report)}\n")
    return {"seed": seed, "tasks": reports}


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write an evaluation as JSON.

    Args:
        report: What :func:`evaluate` returned.
        path: File to write.
    """
    path.write_text(json.dumps(report, indent=1) + "\n")


def _distinct(task: Task, rng: random.Random, count: int) -> list[Exchange]:
    """Draw up to ``count`` exchanges with different held-out prompts."""
    found: dict[str, Exchange] = {}
    for _ in range(3 * count):
        if len(found) == count:
            break
        drawn = draw(task, rng, held_out=True)
        found.setdefault(drawn.prompt, drawn)
    return list(found.values())


@torch.inference_mode()
def _matches(
    draft: LlamaForCausalLM, prompt: list[int], reply: list[int]
) -> list[bool]:
    """Tell for each token of the reply whether the draft predicts it."""
    logits = draft(input_ids=torch.tensor([prompt + reply[:-1]])).logits[0]
    predicted = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return [guess == token for guess, token in zip(predicted, reply, strict=True)]


def _summary(task: Task, report: TaskReport) -> str:
    rates = "  ".join(
        f"k={length} {acceptance.rate:.2f}"
        for length, acceptance in report.acceptance.items()
    )
    return (
        f"{task.name:<12} right {report.right:6.1%}"
        f"  in long chats {report.right_in_long_chat:6.1%}  {rates}"
    )
