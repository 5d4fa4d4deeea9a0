"""Conversations to send: from the demo's generator or from the user's files."""

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.errors import LoadTestError
from loadtest.models.tasks import TASKS, TOOLS, Exchange, Message, draw

_DIFFICULTIES: dict[str, tuple[str, ...]] = {
    "easy": ("easy",),
    "hard": ("hard",),
    **dict.fromkeys(("mixed", "long-context", "chats"), ("easy", "mixed", "hard")),
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
        roles = [*(message["role"] for message in self.messages), "assistant"]
        for end in range(self.num_past + 1, len(roles)):
            if roles[end - 1] != "assistant" and roles[end] == "assistant":
                yield list(self.messages[:end])


@dataclass(frozen=True, slots=True)
class GeneratedWorkload:
    """Held-out prompts of the demo pair's tasks.

    `chats` have several turns behind one of four shared prefixes; `long-context` asks
    behind many earlier turns.
    """

    name: str
    seed: str

    def conversation(self, number: int) -> Conversation:
        """Return the conversation of a number."""
        rng = random.Random(f"{self.seed} {self.name} {number}")
        for _ in range(_MAX_DRAWS):
            conversation = self._draw(rng)
            if _num_chars(conversation.messages) <= _MAX_CHARS:
                return conversation
        raise LoadTestError(f"workload {self.name}: no draw is short enough")

    def _draw(self, rng: random.Random) -> Conversation:
        if self.name == "chats":
            # A quarter of all chats begin with the same turns.
            number = rng.randrange(_NUM_PREFIXES)
            system = {"role": "system", "content": f"You are helper number {number}."}
            shared = random.Random(f"{self.seed} prefix {number}")
            prefix = self._lengthen([system], shared, _PREFIX_CHARS)
            turns = [self._exchange(rng, True) for _ in range(rng.choice(_CHAT_TURNS))]
            asked = [message for turn in turns for message in turn.messages][:-1]
            return Conversation((*prefix, *asked), num_past=len(prefix))
        exchange = self._exchange(rng)
        length = _LONG_CHARS if self.name == "long-context" else 0
        history = self._lengthen([], rng, length)
        tools = TOOLS if exchange.needs_tools else ()
        messages = (*history, *exchange.messages[:-1])
        return Conversation(messages, tools, num_past=len(history))

    def _lengthen(
        self, messages: list[Message], rng: random.Random, num_chars: int
    ) -> list[Message]:
        """Add exchanges until there are as many characters."""
        while _num_chars(messages) < num_chars:
            messages += self._exchange(rng, True).messages
        return messages

    def _exchange(self, rng: random.Random, is_plain: bool = False) -> Exchange:
        difficulty = rng.choice(_DIFFICULTIES[self.name])
        tasks = [
            task
            for task in TASKS.values()
            if task.difficulty == difficulty
            and not (is_plain and task.name.startswith("tool_"))
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


Workload = GeneratedWorkload | FileWorkload
"""A source of conversations; equal numbers give equal ones."""


def make_workload(name: str, seed: str, max_chars: int | None = None) -> Workload:
    """Make a workload from its name, one of `GENERATED` or that of a file.

    `.json` and `.jsonl` hold ShareGPT or OpenAI messages, all else a prompt a line.
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
    if not found:
        raise LoadTestError(f"{path}: holds no prompt")
    limit = max_chars or math.inf
    short = [one for one in found if _num_chars(one.messages) <= limit]
    if not short:
        raise LoadTestError(
            f"{path}: holds no conversation of at most {max_chars} characters; raise "
            "--max-prompt-chars"
        )
    return FileWorkload(short, seed)


def read_conversations(path: Path) -> list[Conversation]:
    """Read all conversations of a file; an error says at which place it is."""
    conversations = []
    for place, entry in _read_entries(path):
        messages = _read_messages(place, entry)
        if any(message["role"] == "user" for message in messages):
            conversations.append(Conversation(tuple(messages)))
    return conversations


@functools.lru_cache(maxsize=2)
def _shuffle(seed: str, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def _read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every entry with its place."""
    place = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            entries = json.loads(text)
            if not isinstance(entries, list):
                raise LoadTestError(f"{path}: must hold a list of conversations")
            for number, entry in enumerate(entries):
                yield f"{path}, entry {number}", entry
            return
        for number, line in enumerate(text.splitlines(), 1):
            place = f"{path}, line {number}"
            if line.strip():
                is_json = path.suffix == ".jsonl"
                yield place, json.loads(line) if is_json else line.strip()
    except UnicodeDecodeError as error:
        raise LoadTestError(f"{path}: is not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise LoadTestError(f"{place}: is not JSON: {error}") from None


def _read_messages(place: str, entry: Any) -> list[Message]:
    prompt = entry.get("prompt") if isinstance(entry, dict) else entry
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(entry, dict):
        raise LoadTestError(f"{place}: must be an object or a text")
    names = ("conversations", "conversation", "conversation_a", "messages")
    turns = next((entry[name] for name in names if entry.get(name)), None)
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
