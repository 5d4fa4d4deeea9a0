"""Answers: refused, whole, or a stream that begins with tokens or a sign of life."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from serving.front import answers
from serving.front.errors import describe

pytestmark = pytest.mark.anyio

BODY = CompletionRequest(model="m", prompt="p")
FIRST = "data: 1\n\n"


async def chunks(
    *texts: str, pause_s: float = 0.0, failure: Exception | None = None
) -> AsyncGenerator[str, None]:
    await asyncio.sleep(pause_s)
    for text in texts:
        yield text
    if failure is not None:
        raise failure


async def read(stream: AsyncGenerator[str, None]) -> list[Any]:
    response = await answers.begin_stream(BODY, stream)
    assert isinstance(response, StreamingResponse)
    return [part async for part in response.body_iterator]


def error_in(event: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(event.removeprefix("data: "))["error"]
    return error


async def test_chunks_pass_in_order_and_a_failure_on_the_way_is_the_last():
    second = "data: 2\n\n"
    assert await read(chunks(FIRST, second)) == [FIRST, second]
    *parts, last = await read(chunks(FIRST, failure=RuntimeError("secret")))
    assert parts == [FIRST]
    assert error_in(last)["code"] == 500
    assert "secret" not in last


async def test_a_stream_that_waits_says_that_it_is_alive_until_it_takes_too_long(
    monkeypatch,
):
    monkeypatch.setattr(answers, "HEADERS_WITHIN_S", 0.02)
    *comments, last = await read(chunks(FIRST, pause_s=0.2))
    assert last == FIRST
    # Clients of server-sent events skip them.
    assert len(comments) >= 2
    assert all(part.startswith(": ") for part in comments)
    monkeypatch.setattr(answers, "FIRST_ANSWER_WITHIN_S", 0.1)
    error = error_in((await read(chunks(FIRST, pause_s=60.0)))[-1])
    assert (error["code"], error["type"]) == (408, "RequestTimeoutError")


async def test_an_answer_that_takes_too_long_is_given_up_with_its_work(monkeypatch):
    monkeypatch.setattr(answers, "FIRST_ANSWER_WITHIN_S", 0.05)
    was_cancelled = False

    async def create(_body: Any, raw_request: Any) -> None:
        nonlocal was_cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    with pytest.raises(TimeoutError) as error:
        await answers.ask(BODY, None, create)
    assert describe(error.value).status == 408
    assert was_cancelled
