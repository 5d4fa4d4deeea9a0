"""What comes of a request: a refusal, a whole answer, or a stream of chunks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMClientError

from serving.compat_ray import DEFAULT_LLM_ROUTER_HTTP_TIMEOUT
from serving.front.errors import (
    describe,
    error_body,
    from_engine,
    reword_streamed_errors,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

logger = logging.getLogger("ray.serve")

HEADERS_WITHIN_S: Final = 10.0
"""A stream that has nothing to say yet begins then, and says that it is alive."""

FIRST_ANSWER_WITHIN_S: Final = DEFAULT_LLM_ROUTER_HTTP_TIMEOUT
"""Then an answer that has not come, or a stream without a token, is given up."""

_INTERNAL_HEADERS: Final = frozenset((b"x-vllm-priority", b"x-data-parallel-rank"))
"""What vLLM's routers say to its servers. The former goes before a class's priority."""

_KEEP_ALIVE: Final = ": waiting for an engine\n\n"
_ERROR_EVENT = re.compile(r'data: \{"error": ')


async def ask(
    body: BaseModel, request: Request | None, create: Callable[..., Awaitable[Any]]
) -> Any:
    """Ask one of vLLM's handlers.

    Args:
        body: What is asked.
        request: Its HTTP request; vLLM reads headers of it, but for those that only
            servers may send.
        create: The handler's method.

    Returns:
        vLLM's answer, or the chunks of a stream.

    Raises:
        ApiError: It refuses.
        TimeoutError: It takes too long; the request has ended in its engine too.
    """
    try:
        async with asyncio.timeout(FIRST_ANSWER_WITHIN_S) as limit:
            answer = await create(body, raw_request=_as_of_a_client(request))
    except (ValueError, VLLMClientError, GracefulHTTPError) as error:
        make_refusal = create.__self__.create_error_response  # type: ignore[attr-defined]  # a bound method
        raise from_engine(make_refusal(error), body) from error
    if limit.expired():
        # vLLM takes any cancellation for a client that has left, and answers that.
        raise TimeoutError
    if isinstance(answer, ErrorResponse):
        raise from_engine(answer, body)
    return answer


def _as_of_a_client(request: Request | None) -> Request | None:
    if request is None:
        return None
    headers = [one for one in request.headers.raw if one[0] not in _INTERNAL_HEADERS]
    return Request({**request.scope, "headers": headers}, request.receive)


async def begin_stream(body: BaseModel, chunks: AsyncGenerator[str, None]) -> Response:
    """Begin a stream, if possible once it is known whether it is an error.

    Args:
        body: The request.
        chunks: Server-sent events of vLLM's.

    Raises:
        ApiError: The stream begins with an error.
    """
    due_s = asyncio.get_running_loop().time() + FIRST_ANSWER_WITHIN_S
    first = asyncio.ensure_future(anext(chunks, None))
    try:
        done, _ = await asyncio.wait((first,), timeout=HEADERS_WITHIN_S)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if done:
        refusal = _find_refusal(first.result())
        if refusal is not None:
            raise from_engine(refusal, body)
    return StreamingResponse(
        _events(first, chunks, due_s), media_type="text/event-stream"
    )


def _find_refusal(chunk: str | None) -> ErrorResponse | None:
    """Return the error that a stream begins with, if it does."""
    if not chunk or not _ERROR_EVENT.match(chunk):
        return None
    error = json.loads(chunk.split("\n", 1)[0].removeprefix("data: "))["error"]
    return ErrorResponse(error=ErrorInfo(**error))


async def _events(
    first: asyncio.Future[str | None],
    chunks: AsyncGenerator[str, None],
    due_s: float,
) -> AsyncGenerator[str, None]:
    """Yield server-sent events; a failure on the way becomes a last `error` event."""
    loop = asyncio.get_running_loop()
    try:
        while not first.done():
            if loop.time() >= due_s:
                raise TimeoutError
            yield _KEEP_ALIVE
            patience_s = min(HEADERS_WITHIN_S, due_s - loop.time())
            await asyncio.wait((first,), timeout=patience_s)
        begin = first.result()
        if begin is not None:
            yield reword_streamed_errors(begin)
        async for chunk in chunks:
            yield reword_streamed_errors(chunk)
    except Exception as error:
        logger.exception("A stream broke off")
        yield f"data: {json.dumps(error_body(describe(error)))}\n\n"
    finally:
        first.cancel()
        # A generator cannot be closed while somebody waits for its next value.
        await asyncio.wait((first,))
        await chunks.aclose()
