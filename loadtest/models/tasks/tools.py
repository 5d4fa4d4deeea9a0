"""Tool calls: the model names a function, reads its result, answers in a sentence."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from .base import Exchange, Message, Task, equals, say
from .words import CITIES, FORMS, TEXTS

_CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)


def parse_call(reply: str) -> dict[str, Any] | None:
    """Read the `name` and `arguments` of the tool call in a reply, if it holds one."""
    found = _CALL.search(reply)
    try:
        call: dict[str, Any] | None = json.loads(found[1]) if found else None
    except json.JSONDecodeError:
        return None
    return call


def _scene(rng: Random) -> tuple[Message, ...]:
    """Write a question, a call, its result and the closing sentence."""
    arguments: dict[str, str | int]
    result: dict[str, str | int]
    if rng.choice(("get_weather", "set_timer")) == "get_weather":
        city, sky, degrees = (
            rng.choice(CITIES),
            rng.choice(TEXTS["skies"]),
            rng.randint(0, 35),
        )
        form = rng.choice(FORMS["weather"])
        when = rng.choice(TEXTS["moments"])
        prompt, name, arguments = form.format(city, when), "get_weather", {"city": city}
        result = {"sky": sky, "degrees": degrees}
        sentence = f"It is {sky}, {degrees} degrees."
    else:
        minutes = rng.randint(1, 90)
        prompt = rng.choice(FORMS["timer"]).format(minutes)
        name, arguments = "set_timer", {"minutes": minutes}
        result, sentence = {"status": "started"}, "The timer is started."
    # As the chat template writes it (Hermes style).
    call = json.dumps({"name": name, "arguments": arguments})
    return (
        say("user", prompt),
        say("assistant", f"<tool_call>\n{call}\n</tool_call>"),
        say("tool", json.dumps(result)),
        say("assistant", sentence),
    )


def _tool_call(rng: Random) -> Exchange:
    messages = _scene(rng)[:2]
    wanted = parse_call(messages[1]["content"])
    return Exchange(messages, lambda reply: parse_call(reply) == wanted, True)


def _tool_answer(rng: Random) -> Exchange:
    messages = _scene(rng)
    return Exchange(messages, equals(messages[-1]["content"]), True)


# A call that nothing answers is rare in chats, so training meets it seldom.
TOOL_TASKS = (
    Task("tool_call", "mixed", True, _tool_call, 0.1),
    Task("tool_answer", "mixed", True, _tool_answer, 1.5),
)
