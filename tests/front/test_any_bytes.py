"""Bytes that nobody thought of: a front refuses them, and never fails.

Hypothesis makes them from bodies that once were trouble, and from those that are fine,
in `bodies/`: cut, joined, and with any bytes in between.
"""

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

KINDS: Final[dict[str, Any]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FILES: Final = sorted(Path(__file__).with_name("bodies").iterdir())
SEEDS: Final = [file.read_bytes() for file in FILES]

# What JSON is made of, so that more than the first byte of a body is read.
PIECE: Final = st.sampled_from(
    [*(bytes([one]) for one in b'{}[]",:\\0-e'), b"null", b"1e999", b'"\\ud800"']
) | st.binary(max_size=4)

Post = Callable[[bytes], set[int]]


def check_with(kind: Any, *, generates: bool) -> Any:
    """A route that checks a body and does nothing with it."""
    front = object.__new__(Front)
    front._classes, front._policy_name = {}, "tetris"

    async def check(body: Any) -> dict[str, Any]:
        if generates:
            front._prepare(body)
        return {}

    check.__annotations__["body"] = kind
    return check


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """Send a body to every route that takes one, and return their statuses."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    api = build_api(1 << 20)
    for path, kind in KINDS.items():
        api.post(path)(check_with(kind, generates=path.startswith("/v1")))
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://server")
    headers = {"Content-Type": "application/json"}

    async def send(content: bytes) -> set[int]:
        answers = [
            await client.post(path, content=content, headers=headers) for path in KINDS
        ]
        for answer in answers:
            assert answer.status_code < 500, (content, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
        return {answer.status_code for answer in answers}

    with asyncio.Runner() as runner:
        yield lambda content: runner.run(send(content))


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Draw a body that was something once."""
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
    answer = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    chunk = f"data: {answer}\n\n"
    assert reword_streamed_errors(chunk) == chunk
    info = ErrorInfo(message=text, type="InternalServerError", code=500)
    failure = json.dumps(ErrorResponse(error=info).model_dump())
    fault = json.dumps(error_body(describe(RuntimeError())))
    assert reword_streamed_errors(f"data: {failure}\n\n") == f"data: {fault}\n\n"
