"""Bodies that nobody thought of: no 5xx, no hang, and the server answers afterwards.

Hypothesis makes some 400 of them, the same each time, from requests that are fine: with
parts replaced by any JSON, and bytes that are no text. A 503 with Retry-After is an
answer too: a request may ask for more than has room.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.conftest import MODEL

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 30.0

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "max_tokens": 2,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x"}},
    "stop": ["a"],
    "vllm_xargs": {"request_class": "x"},
    "stream_options": {"include_usage": True},
}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": ["one", [1, 2]],
    "max_tokens": 2,
    "logprobs": 2,
    "stop": None,
    "structured_outputs": {"regex": "a+"},
    "stream": True,
}
GOOD = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": {"model": MODEL, "messages": CHAT["messages"], "prompt": "a"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
}

# Half surrogate pairs included.
TEXT = st.text(st.characters(), max_size=8)
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | TEXT
    | st.sampled_from(["", "\ud800", "\x00", "auto", "none", "system", "data:,"])
)
JSON = st.recursive(
    LEAF,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(TEXT, one, max_size=3),
    max_leaves=6,
)


def places(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every part of a body."""
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    return [where, *(way for key, one in parts for way in places(one, (*where, key)))]


def replaced(value: Any, where: tuple[Any, ...], part: Any) -> Any:
    """Return a copy in which one part is another."""
    if not where:
        return part
    copy = value.copy()
    copy[where[0]] = replaced(value[where[0]], where[1:], part)
    return copy


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a path, and a body that was fine once."""
    path = draw(st.sampled_from(sorted(GOOD)))
    kept = draw(st.sets(st.sampled_from(sorted(GOOD[path]))))
    body: Any = {name: GOOD[path][name] for name in sorted(kept)}
    for _ in range(draw(st.integers(0, 3))):
        way = draw(st.sampled_from(places(body)))
        body = replaced(body, way, draw(JSON))
        if isinstance(body, dict) and draw(st.booleans()):
            body = {**body, draw(TEXT): draw(JSON)}
    content = json.dumps(body, ensure_ascii=True).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + 1 :]
    return path, content


def test_no_body_makes_a_server_fail(server):
    good = {"model": MODEL, "prompt": "one two", "max_tokens": 4, "temperature": 0}
    expected = server.post("/v1/completions", json=good).json()["choices"][0]["text"]
    statuses: dict[int, int] = {}

    with httpx.Client(
        base_url=server.url, timeout=TIMEOUT_S, trust_env=False
    ) as client:

        @settings(
            max_examples=600,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(requests())
        def ask(request: tuple[str, bytes]) -> None:
            path, content = request
            headers = {"Content-Type": "application/json"}
            answer = client.post(path, content=content, headers=headers)
            status = answer.status_code
            statuses[status] = statuses.get(status, 0) + 1
            if status != 200:
                assert set(answer.json()["error"]) == {
                    "message",
                    "type",
                    "param",
                    "code",
                }
            assert status < 500 or (status == 503 and "retry-after" in answer.headers)

        ask()
    # Else most cases would try nothing behind the validation.
    assert statuses[200] >= 20, statuses
    assert statuses[400] >= 100, statuses
    answer = server.post("/v1/completions", json=good).json()
    assert answer["choices"][0]["text"] == expected
