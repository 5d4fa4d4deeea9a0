"""Value types of the demo tasks, and the split into training and held-out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Difficulty = Literal["easy", "mixed", "hard"]

_HELD_OUT_BUCKETS = 13
_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class Exchange:
    """One request and its reply, as chat messages.

    Attributes:
        messages: From the user turn to the assistant turn that answers it. More
            than two only where a tool call and its result lie between.
        accepts: Tells whether a reply to ``messages[:-1]`` is right.
    """

    task: str
    messages: tuple[Message, ...]
    accepts: Callable[[str], bool]
    needs_tools: bool = False

    @property
    def prompt(self) -> str:
        """The user's words; the held-out split is decided by them."""
        return str(self.messages[0]["content"])

    @property
    def answer(self) -> str:
        """The reference reply: the one right answer, or one of many."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True)
class Task:
    """A family of exchanges.

    Attributes:
        difficulty: How much of an answer follows from the prompt: nearly all of
            it (easy), most of it with steps to work out (mixed), little (hard).
        weight: Relative frequency in training chats.
        practice_only: Whether the models are trained on it without mastering it. Such
            a task is no part of what they are said to know, nor of any workload.
    """

    name: str
    difficulty: Difficulty
    one_right_answer: bool
    generate: Callable[[random.Random], Exchange]
    weight: float = 1.0
    practice_only: bool = False


def exchange(
    task: str, prompt: str, answer: str, accepts: Callable[[str], bool] | None = None
) -> Exchange:
    """Build a plain exchange; by default only ``answer`` itself is right."""
    messages = (
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer},
    )
    return Exchange(task, messages, accepts or equals(answer))


def numbered(lines: Sequence[str]) -> str:
    """Number lines as ``1/3: ...``, so that each one tells how many are to come."""
    return "\n".join(f"{n}/{len(lines)}: {line}" for n, line in enumerate(lines, 1))


def equals(answer: str) -> Callable[[str], bool]:
    """Return a checker that accepts ``answer`` alone, but for outer white space."""
    return lambda reply: reply.strip() == answer


def is_held_out(prompt: str) -> bool:
    """Tell whether a prompt is kept from training.

    The prompt's own hash decides (about 5 % are held out), so the split is the
    same for every seed, process and machine.
    """
    return hashlib.sha256(prompt.encode()).digest()[0] < _HELD_OUT_BUCKETS


def draw(task: Task, rng: random.Random, *, held_out: bool = False) -> Exchange:
    """Draw an exchange from one side of the split.

    Raises:
        RuntimeError: If the task seems to have no prompt on that side.
    """
    for _ in range(_MAX_DRAWS):
        drawn = task.generate(rng)
        if is_held_out(drawn.prompt) is held_out:
            return drawn
    side = "held-out" if held_out else "training"
    raise RuntimeError(
        f"task {task.name!r} gave no {side} prompt in {_MAX_DRAWS} draws;"
        " give it more distinct prompts"
    )
