"""Whole conversations: a system turn now and then, and one to many exchanges."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from .base import Message, Task, draw, say
from .words import TEXTS

_TURN_COUNTS = (1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10)
_TOOL_CHATS = 0.12


class Chat(NamedTuple):
    """A conversation, and whether its system turn lists the tools."""

    messages: tuple[Message, ...]
    with_tools: bool


def generate_chat(
    tasks: Sequence[Task], rng: random.Random, *, num_turns: int | None = None
) -> Chat:
    """Generate a conversation of exchanges that are not held out.

    Tasks are drawn as their weights say, and one to ten turns if no number is given.
    Tool exchanges occur only in chats that list the tools.
    """
    num_turns = num_turns or rng.choice(_TURN_COUNTS)
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
