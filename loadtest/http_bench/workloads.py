"""Conversations to send: from the demo's generator or from the user's files."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from loadtest.demo_pair.tasks import TASKS, TOOLS, Exchange, Message, Task, draw

from .errors import LoadTestError

_DIFFICULTIES: dict[str, tuple[str, ...]] = {
    "easy": ("easy",),
    "hard": ("hard",),
    "mixed": ("easy", "mixed", "hard"),
    "long-context": ("easy", "mixed", "hard"),
    "chats": ("easy", "mixed", "hard"),
}
GENERATED = tuple(_DIFFICULTIES)

_LONG_CHARS = 1500
"""Of earlier turns; about 700 tokens of the demo tokenizer."""

_PREFIX_CHARS = 500
_NUM_PREFIXES = 4
_CHAT_TURNS = (2, 3, 4)
_MAX_CHARS = 1650
"""Of a whole conversation: it must fit into the demo model's context of 1024 tokens,
and some have 1.65 characters a token."""

_MAX_DRAWS = 1000
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
}
"""What ShareGPT and OpenAI call who speaks, and what OpenAI calls it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation whose user turns are to be sent one after another.

    Attributes:
        messages: All turns. Where an assistant turn stands before the last user turn,
            it is sent as history instead of what the server replied, so that every
            arm of a comparison answers the same prompts.
        tools: Functions offered; empty for none.
        num_past: Messages at the begin that were answered long ago: they come with
            every request, and none of them is asked again.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    num_past: int = 0

    def prompts(self) -> Iterator[list[Message]]:
        """Yield the messages of each request: up to and with each user turn."""
        for end, message in enumerate(self.messages, start=1):
            if end <= self.num_past:
                continue
            is_last = end == len(self.messages)
            if not is_last and self.messages[end]["role"] != "assistant":
                continue
            if message["role"] != "assistant":
                yield list(self.messages[:end])


class Workload(Protocol):
    """A source of conversations; equal numbers give equal conversations."""

    def conversation(self, number: int) -> Conversation:
        """Return the conversation of a number, counted from 0."""
        ...


@dataclass(frozen=True, slots=True)
class GeneratedWorkload:
    """Held-out prompts of the demo pair's tasks.

    Attributes:
        name: One of `GENERATED`. `chats` have several turns behind one of four shared
            prefixes; `long-context` asks behind many earlier turns.
        seed: Of all draws.
    """

    name: str
    seed: str

    def conversation(self, number: int) -> Conversation:
        """Return the conversation of a number."""
        rng = random.Random(f"{self.seed} {self.name} {number}")
        for _ in range(_MAX_DRAWS):
            conversation = self._draw(rng)
            if sum(len(str(m["content"])) for m in conversation.messages) <= _MAX_CHARS:
                return conversation
        raise LoadTestError(f"workload {self.name}: no draw is short enough")

    def _draw(self, rng: random.Random) -> Conversation:
        if self.name == "chats":
            return self._chat(rng)
        asked = self._exchange(rng)
        history: list[Message] = []
        while self.name == "long-context" and _num_chars(history) < _LONG_CHARS:
            history += self._exchange(rng, plain=True).messages
        return Conversation(
            (*history, *asked.messages[:-1]),
            TOOLS if asked.needs_tools else (),
            num_past=len(history),
        )

    def _chat(self, rng: random.Random) -> Conversation:
        prefix = self._prefix(rng.randrange(_NUM_PREFIXES))
        messages = list(prefix)
        for _ in range(rng.choice(_CHAT_TURNS)):
            messages += self._exchange(rng, plain=True).messages
        return Conversation(tuple(messages[:-1]), num_past=len(prefix))

    def _prefix(self, number: int) -> list[Message]:
        """Return the turns that a quarter of all chats begin with."""
        rng = random.Random(f"{self.seed} prefix {number}")
        messages: list[Message] = [
            {"role": "system", "content": f"You are helper number {number + 1}."}
        ]
        while _num_chars(messages) < _PREFIX_CHARS:
            messages += self._exchange(rng, plain=True).messages
        return messages

    def _exchange(self, rng: random.Random, *, plain: bool = False) -> Exchange:
        difficulty = rng.choice(_DIFFICULTIES[self.name])
        tasks: list[Task] = [
            task
            for task in TASKS.values()
            if task.difficulty == difficulty
            and not (plain and task.name.startswith("tool_"))
        ]
        task = rng.choices(tasks, weights=[task.weight for task in tasks])[0]
        return draw(task, rng, held_out=True)


@dataclass(frozen=True, slots=True)
class FileWorkload:
    """Conversations of a file, in an order that the seed shuffles, over and over."""

    conversations: Sequence[Conversation]
    seed: str

    def conversation(self, number: int) -> Conversation:
        """Return the conversation of a number."""
        lap, position = divmod(number, len(self.conversations))
        order = _shuffle(f"{self.seed} {lap}", len(self.conversations))
        return self.conversations[order[position]]


def make_workload(name: str, seed: str, max_chars: int | None = None) -> Workload:
    """Make a workload from its name.

    Args:
        name: One of `GENERATED`, or a file: `.json` and `.jsonl` as ShareGPT or OpenAI
            messages, anything else as one prompt a line.
        seed: Equal seeds give equal conversations.
        max_chars: Leave out longer conversations of a file.

    Raises:
        LoadTestError: If it is neither, or the file holds nothing usable.
    """
    if name in GENERATED:
        return GeneratedWorkload(name, seed)
    path = Path(name).expanduser()
    if not path.is_file():
        raise LoadTestError(
            f"{name!r} is no workload; choose from {', '.join(GENERATED)}, or give a "
            "file: ShareGPT .json or .jsonl, or plain text with one prompt a line"
        )
    found = read_conversations(path)
    short = [
        conversation
        for conversation in found
        if max_chars is None or _num_chars(conversation.messages) <= max_chars
    ]
    if not short:
        raise LoadTestError(
            f"{path}: holds no conversation of at most {max_chars} characters; raise "
            "--max-prompt-chars"
            if found
            else f"{path}: holds no prompt"
        )
    return FileWorkload(short, seed)


def read_conversations(path: Path) -> list[Conversation]:
    """Read all conversations of a file.

    Raises:
        LoadTestError: If something in it cannot be read, with the place.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadTestError(f"{path}: is not UTF-8: {error}") from None
    if path.suffix == ".json":
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise LoadTestError(f"{path}: is not JSON: {error}") from None
        if not isinstance(entries, list):
            raise LoadTestError(f"{path}: must hold a list of conversations")
        return _read_entries((f"{path}, entry {n}", e) for n, e in enumerate(entries))
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [
            Conversation(({"role": "user", "content": line.strip()},))
            for _, line in lines
        ]
    entries = []
    for number, line in lines:
        try:
            entries.append((f"{path}, line {number}", json.loads(line)))
        except ValueError as error:
            raise LoadTestError(
                f"{path}, line {number}: is not JSON: {error}"
            ) from None
    return _read_entries(entries)


@functools.lru_cache(maxsize=2)
def _shuffle(seed: str, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def _read_entries(entries: Iterable[tuple[str, Any]]) -> list[Conversation]:
    conversations = []
    for place, entry in entries:
        messages = _read_messages(place, entry)
        if any(message["role"] == "user" for message in messages):
            conversations.append(Conversation(tuple(messages)))
    return conversations


def _read_messages(place: str, entry: Any) -> list[Message]:
    if isinstance(entry, str):
        return [{"role": "user", "content": entry}]
    if not isinstance(entry, dict):
        raise LoadTestError(f"{place}: must be an object or a text")
    if isinstance(entry.get("prompt"), str):
        return [{"role": "user", "content": entry["prompt"]}]
    turns = entry.get("conversations") or entry.get("conversation")
    turns = turns or entry.get("messages")
    if not isinstance(turns, list):
        raise LoadTestError(
            f"{place}: must have `conversations` (ShareGPT), `messages` or `prompt`"
        )
    messages = [_read_turn(f"{place}, turn {n}", t) for n, t in enumerate(turns)]
    # ShareGPT has chats that begin in the middle.
    return list(itertools.dropwhile(lambda m: m["role"] == "assistant", messages))


def _read_turn(place: str, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise LoadTestError(f"{place}: must be an object")
    role = turn.get("role") or turn.get("from")
    content = turn.get("content") if "content" in turn else turn.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        raise LoadTestError(
            f"{place}: must have from and value, or role and content, as texts"
        )
    if role not in _ROLES:
        raise LoadTestError(
            f"{place}: {role!r} is no role; there are {', '.join(_ROLES)}"
        )
    return {"role": _ROLES[role], "content": content}


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(str(message["content"])) for message in messages)
