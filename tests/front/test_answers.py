"""Answers: refused, whole, or a stream that begins with tokens or a sign of life."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from serving.front import answers
from serving.front.app import build_api
from serving.front.errors import ApiError, describe, reword_streamed_errors

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
    *comments, last = await read(chunks(FIRST, pause_s=1.0))
    assert last == FIRST
    # Clients of server-sent events skip them.
    assert len(comments) >= 2
    assert all(part.startswith(": ") for part in comments)
    monkeypatch.setattr(answers, "FIRST_ANSWER_WITHIN_S", 0.1)
    error = error_in((await read(chunks(FIRST, pause_s=60.0)))[-1])
    assert (error["code"], error["type"]) == (408, "RequestTimeoutError")


async def test_vllm_reads_no_header_that_only_its_routers_may_send():
    """A priority there would go before that of the class, and of the caller's key."""
    sent = {"X-Vllm-Priority": "-9", "X-Data-Parallel-Rank": "1", "X-Request-ID": "own"}

    async def create(_body: Any, raw_request: Request) -> dict[str, str]:
        return dict(raw_request.headers)

    raw = [(name.lower().encode(), value.encode()) for name, value in sent.items()]
    request = Request({"type": "http", "headers": raw})
    assert await answers.ask(BODY, request, create) == {"x-request-id": "own"}


@pytest.mark.parametrize("is_told", [True, False])
async def test_an_answer_that_takes_too_long_is_given_up_and_a_408(
    is_told, monkeypatch
):
    """Some of vLLM's handlers take any cancellation for a client's that has left."""
    monkeypatch.setattr(answers, "FIRST_ANSWER_WITHIN_S", 0.05)

    async def create(_body: Any, raw_request: Any) -> ErrorResponse:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if is_told:
                raise
        gone = "Client disconnected"
        return ErrorResponse(error=ErrorInfo(message=gone, type="Any", code=400))

    with pytest.raises(TimeoutError) as error:
        await answers.ask(BODY, None, create)
    assert describe(error.value).status == 408


async def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_is_logged(serve_log):
    """Whatever its type: libraries raise ValueError for their own faults too."""
    api = build_api(max_body_bytes=1024)

    @api.get("/fails")
    def fail() -> None:
        raise ValueError("no key in /opt/secret.py")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(api)) as client:
        response = await client.get("http://server/fails")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Internal server error."
    assert "secret" in serve_log.text


def test_streams_keep_vllms_own_failures_to_the_log():
    """One by one, if several arrive together; test_any_bytes has any text."""

    def event(code: int, message: str) -> str:
        kind = {"message": message, "type": "Any", "param": None, "code": code}
        return f"data: {json.dumps({'error': kind})}\n\n"

    told = [(400, "Too long."), (503, "None took it in time.")]
    told += [(500, "CUDA error"), (500, str(EngineDeadError()))]
    seen = reword_streamed_errors("".join(event(*one) for one in told))
    *errors, rest = seen.split("\n\n")
    refused, late, internal, dead = map(error_in, errors)
    assert not rest
    assert refused["message"] == "Too long."
    assert (late["code"], late["message"]) == (503, "None took it in time.")
    assert (internal["code"], internal["message"]) == (500, "Internal server error.")
    assert dead["code"] == 503
    assert "retry" in dead["message"]


async def test_a_stream_that_begins_with_an_error_has_its_status():
    """A client must not take an answer of 200 for one that was never begun."""
    refusal = {"message": "full", "type": "Service Unavailable", "code": 503}
    event = f"data: {json.dumps({'error': refusal})}\n\n"
    with pytest.raises(ApiError, match="full") as error:
        await read(chunks(event, "data: [DONE]\n\n"))
    assert error.value.status == 503
