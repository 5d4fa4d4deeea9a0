"""Bytes that nobody thought of: a front refuses them, and never fails.

Hypothesis makes them from bodies that once were trouble, and from those that are fine,
in `bodies/`: cut, joined, and with any bytes in between; atheris, in `fuzz_bytes.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from serving.front.app import Front, build_api
from serving.front.errors import describe, error_body, reword_streamed_errors
from serving.front.live_limits import LiveLimits
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

# How a stream says that something of the server's own failed.
FAULT: Final = f"data: {json.dumps(error_body(describe(RuntimeError())))}\n\n"

# What JSON is made of, so that more than the first byte of a body is read.
SIGNS: Final = [bytes([one]) for one in b'{}[]",:\\0-e']
WORDS: Final = [b"null", b"NaN", b'"\\ud800"', b"1e999"]
PIECE: Final = st.sampled_from(SIGNS + WORDS) | st.binary(max_size=4)


class Bodies:
    """The real web application, whose routes check a body and do nothing with it."""

    def __init__(self) -> None:
        api = build_api(1 << 20)
        for path, kind in KINDS.items():
            api.post(path)(make_check(kind, generates=path.startswith("/v1")))
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(
            transport=transport,
            base_url="http://server",
            headers={"Content-Type": "application/json"},
        )
        self._runner = asyncio.Runner()

    def post(self, content: bytes) -> set[int]:
        """Send a body to every route that takes one, and return their statuses."""
        return {self._post(path, content) for path in KINDS}

    def _post(self, path: str, content: bytes) -> int:
        answer = self._runner.run(self._client.post(path, content=content))
        assert answer.status_code < 500, (path, content, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
        return answer.status_code

    def close(self) -> None:
        self._runner.close()


def make_check(kind: Any, *, generates: bool) -> Any:
    front = object.__new__(Front)
    front._limits, front._policy_name = LiveLimits({}, 1, 1, 0), "tetris"

    async def check(body: Any) -> dict[str, Any]:
        if generates:
            front._prepare(body)
        return {}

    check.__annotations__["body"] = kind
    return check


def stream(content: bytes) -> None:
    """See that what a model says passes, and what vLLM says of a failure does not."""
    text = content.decode("utf-8", "replace")
    answer = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    chunk = f"data: {answer}\n\n"
    assert reword_streamed_errors(chunk) == chunk
    info = ErrorInfo(message=text, type="InternalServerError", code=500)
    failure = json.dumps(ErrorResponse(error=info).model_dump())
    assert reword_streamed_errors(f"data: {failure}\n\n") == FAULT


@pytest.fixture(scope="module")
def bodies() -> Iterator[Bodies]:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    running = Bodies()
    yield running
    running.close()


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
def test_what_was_trouble_once_is_refused(bodies, file):
    assert (200 in bodies.post(file.read_bytes())) == file.stem.startswith("good-")


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(contents())
def test_no_bytes_are_a_fault_of_the_server(bodies, content):
    assert max(bodies.post(content)) < 500


@given(st.text() | st.sampled_from(['"error"', 'data: {"error": 1}', "\n\ndata: "]))
def test_no_text_breaks_a_stream(text):
    stream(text.encode("utf-8", "replace"))
