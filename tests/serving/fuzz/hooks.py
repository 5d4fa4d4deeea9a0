"""What schemathesis is told of this server: cheap cases, what is a fault, a count.

Its command line imports this, in a process of its own.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

import schemathesis

from tests.serving.conftest import MODEL

COUNTS_FILE: Final = "TETRIS_FUZZ_COUNTS"
"""Environment variable: where the answers are counted, by route and status."""

EVERY: Final = "TETRIS_FUZZ_EVERY"
"""Environment variable: of all cases, one in so many is sent."""

MOST: Final = {"n": 3, "best_of": 3, "min_tokens": 4, "max_completion_tokens": 4}
"""Numbers beyond these are lowered: they cost an engine time and find nothing."""

_MAX_TOKENS: Final = 4

_CHAT: Final = "post /v1/chat/completions"
_LINKS: Final = (
    (
        "get /v1/models",
        "get /v1/models/{model}",
        {"parameters": {"model": "$response.body#/data/0/id"}},
    ),
    (
        "post /tokenize",
        "post /detokenize",
        {"requestBody": {"tokens": "$response.body#/tokens"}},
    ),
    (
        "post /tokenize",
        "post /v1/completions",
        {"requestBody": {"prompt": "$response.body#/tokens"}},
    ),
    (
        "post /v1/completions",
        "post /tokenize",
        {"requestBody": {"prompt": "$response.body#/choices/0/text"}},
    ),
    (
        _CHAT,
        _CHAT,
        {"requestBody": {"messages": ["$response.body#/choices/0/message"]}},
    ),
)
"""What of an answer may be in a next request: the schema itself says nothing of it."""

_every = int(os.environ.get(EVERY, "1"))
_numbers = itertools.count()
_counts: Counter[str] = Counter()
_lock = threading.Lock()


@schemathesis.hook
def before_load_schema(_: Any, raw_schema: dict[str, Any]) -> None:
    """Add the links that make sequences of requests."""
    for source, target, values in _LINKS:
        method, path = source.split()
        answer = raw_schema["paths"][path][method]["responses"]["200"]
        to_method, to_path = target.split()
        place = to_path.replace("/", "~1")
        answer.setdefault("links", {})[f"to {to_path}"] = {
            "operationRef": f"#/paths/{place}/{to_method}",
            **values,
        }


@schemathesis.hook
def filter_case(_: Any, __: Any) -> bool:
    return next(_numbers) % _every == 0


@schemathesis.hook
def before_call(_: Any, case: Any, __: dict[str, Any]) -> None:
    """Name the model that there is, and ask for few tokens."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and body["model"]:
        body["model"] = MODEL
    for name, most in MOST.items():
        if isinstance(body.get(name), int) and body[name] > most:
            body[name] = most
    if "completions" in case.path:
        given = body.get("max_tokens")
        if given is None or (isinstance(given, int) and given > _MAX_TOKENS):
            body["max_tokens"] = _MAX_TOKENS


@schemathesis.hook
def after_call(_: Any, case: Any, response: Any) -> None:
    with _lock:
        _counts[f"{case.method} {case.path} {response.status_code}"] += 1


@schemathesis.check
def is_an_answer(_: Any, response: Any, case: Any) -> None:
    """Refuse faults of the server, and answers that no client could read."""
    status = response.status_code
    if status >= 500:
        assert status == 503, f"{status} is a fault of the server"
        assert "retry-after" in response.headers, "nobody says when to come back"
    kind = response.headers.get("content-type", [""])[0]
    if case.method == "HEAD" or "json" not in kind:
        if "event-stream" in kind:
            _check_events(response.content.decode())
        return
    answer = json.loads(response.content)
    if status >= 400:
        assert set(answer["error"]) == {"message", "type", "param", "code"}, answer


def _check_events(text: str) -> None:
    *events, rest = text.split("\n\n")
    assert not rest, f"half an event: {rest!r}"
    data = [event for event in events if not event.startswith(":")]
    assert data[-1] == "data: [DONE]" or '"error"' in data[-1], data[-1]
    for event in data:
        if event != "data: [DONE]":
            json.loads(event.removeprefix("data: "))


@atexit.register
def _write() -> None:
    if file := os.environ.get(COUNTS_FILE):
        Path(file).write_text(json.dumps(_counts), "utf-8")
