"""Whole conversations: a system turn now and then, and one to many exchanges."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .base import Exchange, Message, Task, draw
from .tools import TOOLS
from .words import TEXTS

SYSTEM_PROMPTS = TEXTS["system_prompts"]
_TURN_COUNTS = (1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10)
_TOOL_CHATS = 0.12


@dataclass(frozen=True)
class Chat:
    """A conversation, whose system turn may list tools, and what it was made of."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    exchanges: tuple[Exchange, ...]


def generate_chat(
    tasks: Sequence[Task],
    rng: random.Random,
    *,
    num_turns: int | None = None,
    held_out: bool = False,
) -> Chat:
    """Generate a conversation of exchanges from one side of the split.

    Tasks are drawn as their weights say, and one to ten turns if no number is given.
    Tool exchanges occur only in chats that list the tools.
    """
    num_turns = num_turns or rng.choice(_TURN_COUNTS)
    with_tools = rng.random() < _TOOL_CHATS and any(_is_tool(t) for t in tasks)
    plain = [task for task in tasks if not _is_tool(task)]
    tool = [task for task in tasks if _is_tool(task)]
    exchanges = []
    for _ in range(num_turns):
        use_tool = with_tools and (not plain or rng.random() < 0.7)
        pool = tool if use_tool else plain
        task = rng.choices(pool, weights=[task.weight for task in pool])[0]
        exchanges.append(draw(task, rng, held_out=held_out))
    messages = [message for drawn in exchanges for message in drawn.messages]
    if rng.random() < 0.4:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return Chat(tuple(messages), TOOLS if with_tools else (), tuple(exchanges))


def _is_tool(task: Task) -> bool:
    return task.name.startswith("tool_")
