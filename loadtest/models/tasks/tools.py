"""Tool calls: the model names a function, reads its result, answers in a sentence."""

from __future__ import annotations

import json
import random
import re
from typing import Any, NamedTuple

from .base import Exchange, Message, Task, equals
from .words import CITIES, FORMS

_SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
_CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": type_} for key, type_ in types.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("get_weather", "Weather in a city", city="string"),
    _tool("set_timer", "Start a timer", minutes="integer"),
)


class _Scene(NamedTuple):
    """One use of a tool: question, call, result and closing sentence."""

    prompt: str
    name: str
    arguments: dict[str, str | int]
    result: dict[str, str | int]
    sentence: str


def _weather(rng: random.Random) -> _Scene:
    city, sky, degrees = rng.choice(CITIES), rng.choice(_SKIES), rng.randint(0, 35)
    form = rng.choice(FORMS["weather"])
    when = rng.choice(("today", "now", "this morning", "tonight"))
    return _Scene(
        form.format(city, when),
        "get_weather",
        {"city": city},
        {"sky": sky, "degrees": degrees},
        f"It is {sky}, {degrees} degrees.",
    )


def _timer(rng: random.Random) -> _Scene:
    minutes = rng.randint(1, 90)
    form = rng.choice(FORMS["timer"])
    return _Scene(
        form.format(minutes),
        "set_timer",
        {"minutes": minutes},
        {"status": "started"},
        "The timer is started.",
    )


def call_text(name: str, arguments: dict[str, str | int]) -> str:
    """Write a tool call as the chat template does (Hermes style)."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def parse_call(reply: str) -> dict[str, Any] | None:
    """Read the `name` and `arguments` of the tool call in a reply, if it holds one."""
    found = _CALL.search(reply)
    if found is None:
        return None
    try:
        call: dict[str, Any] = json.loads(found[1])
    except json.JSONDecodeError:
        return None
    return call


def _scene(rng: random.Random) -> _Scene:
    return rng.choice((_weather, _timer))(rng)


def _call_turns(scene: _Scene) -> tuple[Message, Message]:
    text = call_text(scene.name, scene.arguments)
    return (
        {"role": "user", "content": scene.prompt},
        {"role": "assistant", "content": text},
    )


def _tool_call(rng: random.Random) -> Exchange:
    scene = _scene(rng)
    wanted = {"name": scene.name, "arguments": scene.arguments}
    return Exchange(
        "tool_call",
        _call_turns(scene),
        lambda reply: parse_call(reply) == wanted,
        needs_tools=True,
    )


def _tool_answer(rng: random.Random) -> Exchange:
    scene = _scene(rng)
    messages = (
        *_call_turns(scene),
        {"role": "tool", "content": json.dumps(scene.result)},
        {"role": "assistant", "content": scene.sentence},
    )
    return Exchange("tool_answer", messages, equals(scene.sentence), needs_tools=True)


# A call that nothing answers is rare in chats, so training meets it seldom.
TOOL_TASKS = (
    Task("tool_call", "mixed", True, _tool_call, 0.1),
    Task("tool_answer", "mixed", True, _tool_answer, 1.5),
)
