"""Exchanges and whole chats of the demo tasks, and the split into held-out or not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .words import FORMS, TEXTS

Message = dict[str, Any]
Ask = Callable[..., str]
"""Fills one of a task's forms with what is given."""

_HELD_OUT_BUCKETS = 13
_MAX_DRAWS = 10_000
_TURN_COUNTS = (1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10)
_TOOL_CHATS = 0.12


@dataclass(frozen=True)
class Exchange:
    """One request and its reply, as chat messages.

    `messages` go from the user turn to the assistant turn that answers it. There are
    more than two only where a tool call and its result lie between.
    """

    messages: tuple[Message, ...]
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
    difficulty: str
    one_right_answer: bool
    generate: Callable[[random.Random], Exchange]
    weight: float = 1.0
    practice_only: bool = False


Write = Callable[[random.Random, Ask], tuple[str, str]]


def add_to(
    tasks: list[Task],
    difficulty: str,
    weight: float = 1.0,
    *,
    one_right_answer: bool = True,
    practice_only: bool = False,
) -> Callable[[Write], None]:
    """Add a task by the name of the function that writes a prompt and its answer."""

    def add(write: Write) -> None:
        name = write.__name__.lstrip("_")

        def generate(rng: random.Random) -> Exchange:
            def ask(*given: object) -> str:
                return rng.choice(FORMS[name]).format(*given)

            prompt, answer = write(rng, ask)
            return Exchange((say("user", prompt), say("assistant", answer)))

        task = Task(name, difficulty, one_right_answer, generate, weight, practice_only)
        tasks.append(task)

    return add


def say(role: str, content: str) -> Message:
    """Return a turn of a chat."""
    return {"role": role, "content": content}


def numbered(lines: Sequence[str]) -> str:
    """Number lines as ``1/3: ...``, so that each one tells how many are to come."""
    return "\n".join(f"{n}/{len(lines)}: {line}" for n, line in enumerate(lines, 1))


def is_held_out(prompt: str) -> bool:
    """Tell whether a prompt is kept from training, as about 5 % are.

    By its own hash, so that the split is the same for every seed and machine.
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
    raise RuntimeError(f"task {task.name!r} gave no such prompt in {_MAX_DRAWS} draws")


class Chat(NamedTuple):
    """A conversation, and whether its system turn lists the tools."""

    messages: tuple[Message, ...]
    with_tools: bool


def generate_chat(tasks: Sequence[Task], rng: random.Random) -> Chat:
    """Generate a conversation of one to ten exchanges that are not held out.

    Tasks are drawn as their weights say. Tool exchanges occur only in chats that list
    the tools.
    """
    num_turns = rng.choice(_TURN_COUNTS)
    plain = [task for task in tasks if not task.name.startswith("tool_")]
    tool = [task for task in tasks if task not in plain]
    with_tools = rng.random() < _TOOL_CHATS and bool(tool)
    messages: list[Message] = []
    for _ in range(num_turns):
        pool = tool if with_tools and (not plain or rng.random() < 0.7) else plain
        task = rng.choices(pool, weights=[task.weight for task in pool])[0]
        messages += draw(task, rng).messages
    if rng.random() < 0.4:
        messages.insert(0, say("system", rng.choice(TEXTS["system_prompts"])))
    return Chat(tuple(messages), with_tools)
