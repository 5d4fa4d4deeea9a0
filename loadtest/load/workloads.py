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

from loadtest.client.errors import LoadTestError
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

_FORMS = (
    "write ShareGPT's `conversations`, OpenAI's `messages` or a `prompt`, in a list of "
    f"JSON or as JSON lines, or plain lines in UTF-8; roles are {', '.join(_ROLES)}"
)


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
    place, conversations = str(path), []
    unit = "entry" if path.suffix == ".json" else "line"
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line.strip() for line in text.splitlines()]
        entries = json.loads(text) if unit == "entry" else lines
        if not isinstance(entries, list):
            raise TypeError("not a list")
        for number, entry in enumerate(entries, 1):
            place = f"{path}, {unit} {number}"
            if entry == "":
                continue
            is_json = path.suffix == ".jsonl"
            messages = _read_messages(json.loads(entry) if is_json else entry)
            if any(message["role"] == "user" for message in messages):
                conversations.append(Conversation(tuple(messages)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LoadTestError(f"{place}: {error!r}; {_FORMS}") from None
    return conversations


@functools.lru_cache(maxsize=2)
def _shuffle(seed: str, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def _read_messages(entry: Any) -> list[Message]:
    prompt = entry if isinstance(entry, str) else entry.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    names = ("conversations", "conversation", "conversation_a")
    turns = next((entry[name] for name in names if entry.get(name)), None)
    messages = [_read_turn(turn) for turn in turns or entry["messages"]]
    # ShareGPT has chats that begin in the middle.
    return list(itertools.dropwhile(lambda m: m["role"] == "assistant", messages))


def _read_turn(turn: Any) -> Message:
    content = turn["content"] if "content" in turn else turn["value"]
    if not isinstance(content, str):
        raise TypeError(f"not a text: {content!r}")
    return {"role": _ROLES[turn.get("role") or turn["from"]], "content": content}


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(str(message["content"])) for message in messages)
