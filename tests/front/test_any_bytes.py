"""Bytes that nobody thought of: a front refuses them, and never fails.

Hypothesis makes them from bodies that once were trouble, and from those that are fine,
in `bodies/`: cut, joined, and with any bytes in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from serving.front.app import Front, build_api
from serving.front.errors import describe, error_body, reword_streamed_errors
from serving.front.request_body import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

FILES: Final = sorted(Path(__file__).with_name("bodies").iterdir())
SEEDS: Final = [file.read_bytes() for file in FILES]
KINDS: Final[dict[str, Any]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FAULT: Final = f"data: {json.dumps(error_body(describe(RuntimeError())))}\n\n"
"""How a stream says that something of the server's own failed."""

# What JSON is made of, so that more than the first byte of a body is read.
PIECE: Final = st.sampled_from(
    [
        *(bytes([one]) for one in b'{}[]",:\\0-e'),
        b"null",
        b"NaN",
        b'"\\ud800"',
        b"1e999",
    ]
) | st.binary(max_size=4)


def _check(kind: Any, *, generates: bool) -> Any:
    front = object.__new__(Front)
    front._classes, front._policy_name = {}, "tetris"

    async def check(body: Any) -> dict[str, Any]:
        if generates:
            front._prepare(body)
        return {}

    check.__annotations__["body"] = kind
    return check


@pytest.fixture(scope="module")
def post() -> Iterator[Callable[[bytes], set[int]]]:
    """Send a body to every route that takes one, and return the statuses.

    Routes of the real web application, which check it and do nothing with it.
    """
    api = build_api(1 << 20)
    for path, kind in KINDS.items():
        api.post(path)(_check(kind, generates=path.startswith("/v1")))
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def send(content: bytes) -> set[int]:
        statuses = set()
        for path in KINDS:
            headers = {"Content-Type": "application/json"}
            answer = await client.post(path, content=content, headers=headers)
            assert answer.status_code < 500, (path, content, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
            statuses.add(answer.status_code)
        return statuses

    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        # Thousands of refusals; each would be logged.
        patch.setattr(logging.getLogger("ray.serve"), "disabled", True)
        yield lambda content: runner.run(send(content))


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    content = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(start + 8, len(content))))
        content = content[:start] + draw(PIECE) + content[end:]
    return content


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_was_trouble_once_is_refused(post, file):
    assert (200 in post(file.read_bytes())) == file.stem.startswith("good-")


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(contents())
def test_no_bytes_are_a_fault_of_the_server(post, content):
    post(content)


@settings(derandomize=True, database=None, deadline=None)
@given(st.text() | st.sampled_from(['"error"', 'data: {"error": 1}', "\n\ndata: "]))
def test_what_a_model_says_passes_and_what_vllm_says_of_a_failure_does_not(text):
    text = text.encode("utf-8", "replace").decode()
    answer = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    chunk = f"data: {answer}\n\n"
    assert reword_streamed_errors(chunk) == chunk
    info = ErrorInfo(message=text, type="InternalServerError", code=500)
    failure = json.dumps(ErrorResponse(error=info).model_dump())
    assert reword_streamed_errors(f"data: {failure}\n\n") == FAULT
