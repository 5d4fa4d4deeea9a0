"""Seeded tasks and chats that the demo pair learns and load tests replay.

Standard library only. Every exchange comes from a ``random.Random`` that the
caller seeds; :func:`is_held_out` splits prompts into training and held-out.
"""

from .base import Exchange, Message, Task, draw, generate_chat, is_held_out
from .exact import EASY_TASKS, MIXED_TASKS, TOOL_TASKS
from .free import FREE_TASKS
from .words import TOOLS

TRAINING_TASKS = (*EASY_TASKS, *MIXED_TASKS, *TOOL_TASKS, *FREE_TASKS)
TASKS = {task.name: task for task in TRAINING_TASKS if not task.practice_only}

__all__ = [
    "TASKS",
    "TOOLS",
    "TOOL_TASKS",
    "TRAINING_TASKS",
    "Exchange",
    "Message",
    "Task",
    "draw",
    "generate_chat",
    "is_held_out",
]
