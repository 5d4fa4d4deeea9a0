"""Prompts of the paper's datasets, each from the file that its source hands out."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtest.errors import LoadTestError
from loadtest.load.workloads import Conversation, read_conversations

OWN = "own"
"""The two hundred prompts of this repository."""

HELD_OUT = Path(__file__).parents[1] / "load" / "held_out_prompts.jsonl"
MIXED = ("sonnet", "tough")
"""Half easy and half hard, as in the reference implementation."""

_POEM_LINES = 10
_POEM = "Pick as many lines as you can from these poem lines, and go on with them:\n"


def load_prompts(
    files: Mapping[str, Path], names: Sequence[str], seed: int
) -> dict[str, list[Conversation]]:
    """Return conversations of one user turn each, shuffled.

    Args:
        files: The file of each dataset that is at hand, by name: `sharegpt`, `arena`
            (Chatbot Arena), `tough` (Domain-Tough) or `sonnet`.
        names: Datasets wanted: one of these, `own`, `mix` (sonnets and Domain-Tough
            in equal parts) or `all_mix` (all that are at hand).
        seed: Of the order.
    """
    own = {OWN: _read_chats(HELD_OUT)}
    for name, path in files.items():
        if name not in _READERS:
            known = ", ".join(_READERS)
            raise LoadTestError(f"--file {name}: is no dataset; there are {known}")
        own[name] = [text for text in _READERS[name](path) if text.strip()]
        if not own[name]:
            raise LoadTestError(f"--file {name}={path}: holds no prompt")
    found = {}
    for name in names:
        parts = {"mix": MIXED, "all_mix": tuple(files)}.get(name, (name,))
        if missing := [part for part in parts or _READERS if part not in own]:
            raise LoadTestError(
                f"--datasets {name}: give its prompts as "
                + " ".join(f"--file {part}=FILE" for part in missing)
            )
        shuffled = (
            random.Random(f"{seed} {part}").sample(own[part], len(own[part]))
            for part in parts
        )
        # Equal parts, as long as the shortest goes.
        texts = itertools.chain(*zip(*shuffled, strict=False))
        found[name] = [Conversation(({"role": "user", "content": t},)) for t in texts]
    return found


def _read_chats(path: Path) -> list[str]:
    """Read the first human turns of chats; Domain-Tough has no others."""
    firsts = (next(chat.prompts()) for chat in read_conversations(path))
    return [str(messages[-1]["content"]) for messages in firsts]


def _read_sonnets(path: Path) -> list[str]:
    """Read a text of verses: ten lines a prompt."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [
        _POEM + "\n".join(lines[first : first + _POEM_LINES])
        for first in range(0, len(lines), _POEM_LINES)
    ]


_READERS: dict[str, Callable[[Path], list[str]]] = {
    "sharegpt": _read_chats,
    "arena": _read_chats,
    "tough": _read_chats,
    "sonnet": _read_sonnets,
}
