"""Answers: refused, whole, or a stream that begins with tokens or a sign of life."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from serving.front import answers
from serving.front.errors import ApiError, describe

BODY = CompletionRequest(model="m", prompt="p")


async def chunks(
    *texts: str, pause_s: float = 0.0, failure: Exception | None = None
) -> AsyncGenerator[str, None]:
    await asyncio.sleep(pause_s)
    for text in texts:
        yield text
    if failure is not None:
        raise failure


def read(stream: AsyncGenerator[str, None]) -> list[Any]:
    async def begin_and_read() -> list[Any]:
        response = await answers.begin_stream(BODY, stream)
        assert isinstance(response, StreamingResponse)
        return [part async for part in response.body_iterator]

    return asyncio.run(begin_and_read())


def test_chunks_pass_in_order() -> None:
    assert read(chunks("data: 1\n\n", "data: 2\n\n")) == ["data: 1\n\n", "data: 2\n\n"]


def test_a_stream_that_begins_with_an_error_has_its_status() -> None:
    """A client must not take an answer of 200 for one that was never begun."""
    refusal = {"message": "full", "type": "Service Unavailable", "code": 503}
    event = f"data: {json.dumps({'error': refusal})}\n\n"
    with pytest.raises(ApiError, match="full") as error:
        read(chunks(event, "data: [DONE]\n\n"))
    assert error.value.status == 503


def test_a_stream_that_waits_says_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "HEADERS_WITHIN_S", 0.02)

    async def begin_and_read() -> list[Any]:
        has_waited = asyncio.Event()

        async def late() -> AsyncGenerator[str, None]:
            await has_waited.wait()
            yield "data: 1\n\n"

        response = await answers.begin_stream(BODY, late())
        assert isinstance(response, StreamingResponse)
        parts = []
        async for part in response.body_iterator:
            parts.append(part)
            if len(parts) == 2:
                has_waited.set()
        return parts

    *comments, last = asyncio.run(begin_and_read())
    assert last == "data: 1\n\n"
    # Clients of server-sent events skip them.
    assert len(comments) >= 2
    assert all(part.startswith(": ") for part in comments)


def test_a_stream_whose_first_token_takes_too_long_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "HEADERS_WITHIN_S", 0.02)
    monkeypatch.setattr(answers, "FIRST_ANSWER_WITHIN_S", 0.1)
    *_, last = read(chunks("data: 1\n\n", pause_s=60.0))
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (408, "RequestTimeoutError")


def test_an_answer_that_takes_too_long_is_given_up_with_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "FIRST_ANSWER_WITHIN_S", 0.05)

    class Handler:
        was_cancelled = False

        async def create(self, _body: Any, raw_request: Any) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise

    handler = Handler()
    with pytest.raises(TimeoutError) as error:
        asyncio.run(answers.ask(BODY, None, handler.create))
    assert describe(error.value).status == 408
    assert handler.was_cancelled


def test_a_failure_on_the_way_is_the_last_event() -> None:
    parts = read(chunks("data: 1\n\n", failure=RuntimeError("secret")))
    assert parts[0] == "data: 1\n\n"
    error = json.loads(parts[-1].removeprefix("data: "))["error"]
    assert error["code"] == 500
    assert "secret" not in parts[-1]
