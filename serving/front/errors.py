"""Every failure as an OpenAI error object with the right HTTP status.

    {"error": {"message": ..., "type": ..., "param": <field or null>, "code": <status>}}

`param` names the request's field as a dotted path (`messages.0.role`). Messages never
repeat the request's own content, nor the server's internals.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

logger = logging.getLogger("ray.serve")

MAX_BODY_S: Final = 60.0
"""For a whole body, so that slow senders hold nothing."""

_RETRY_AFTER_S: Final = 1

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    422: "BadRequestError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}

_FIELD = re.compile(r"[a-z][a-z0-9_]*")
_ECHO = re.compile(r" \(parameter=.*\)$", re.DOTALL)
"""What vLLM appends to some messages: the field again, and the client's own input."""

_STREAMED_ERROR = re.compile(r'^data: (\{"error": .*\})$', re.MULTILINE)
"""How vLLM says in the middle of a stream that it broke off."""

_GRAMMAR = re.compile(r"grammar|schema", re.IGNORECASE)
_GRAMMAR_FIELDS: Final = ("response_format", "structured_outputs", "tools")
_TYPE_NAMES: Final = frozenset(
    ("str", "int", "float", "bool", "bytes", "list", "dict", "set", "tuple", "none")
)


class ApiError(Exception):
    """A refusal whose wording, status and field are already decided."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = _RETRY_AFTER_S
        self.headers: Mapping[str, str] = {}


def describe(error: BaseException) -> ApiError:
    """Decide what a client may know of a failure.

    Args:
        error: Whatever was raised.

    Returns:
        Status, message and field. Failures that are not the client's are reduced to a
        sentence; their details belong in the log.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _describe_validation(error.errors())
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case EngineDeadError():
            return ApiError(503, "The engine is not available at the moment; retry.")
        case VLLMClientError():
            message = str(error.args[0]) if error.args else "Invalid request."
            return ApiError(400, message, getattr(error, "parameter", None))
        case asyncio.TimeoutError():
            return ApiError(408, "The request took too long.")
        case _:
            return ApiError(500, "Internal server error.")


def error_body(error: ApiError) -> dict[str, Any]:
    """Render the error object."""
    kind = _TYPES.get(error.status, HTTPStatus(error.status).phrase.replace(" ", ""))
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.status,
        }
    }


def error_response(error: BaseException) -> JSONResponse:
    """Answer a failure; 503 and 429 say when to come back."""
    described = describe(error)
    headers = dict(described.headers)
    if described.status in {429, 503}:
        headers["Retry-After"] = str(described.retry_after_s)
    return JSONResponse(error_body(described), described.status, headers)


def reword_streamed_errors(events: str) -> str:
    """Keep a server's internals out of what vLLM says when a stream breaks off.

    Args:
        events: Server-sent events, whole ones.
    """
    if '"error"' not in events:
        return events
    return _STREAMED_ERROR.sub(_reword, events)


def _reword(event: re.Match[str]) -> str:
    error = json.loads(event[1])["error"]
    if error["code"] != 500:  # Others have words of their own, 503 above all.
        return event[0]
    return f"data: {json.dumps(error_body(_conceal(error['message'])))}"


def _conceal(message: str) -> ApiError:
    """Log what vLLM says of a failure of its own; return what a client may know."""
    logger.error("The engine failed: %s", message)
    died = message == str(EngineDeadError())
    return describe(EngineDeadError() if died else RuntimeError())


def from_engine(response: ErrorResponse, body: BaseModel) -> ApiError:
    """Take over a refusal that vLLM has worded, naming the field if it did not.

    Args:
        response: vLLM's answer.
        body: The request it refused.
    """
    error = response.error
    status = 400 if error.code == 422 else int(error.code)
    message = _ECHO.sub("", error.message)
    if status == 500:
        return _conceal(message)
    if status != 400:
        return ApiError(status, message, error.param)
    return ApiError(status, message, _request_field(error.param, message, body))


def _request_field(param: str | None, message: str, body: BaseModel) -> str | None:
    """Name the request's own field for what vLLM calls by an engine-side name."""
    fields = body.model_fields_set
    if param in {"input_tokens", "input_text"}:
        return "messages" if "messages" in fields else "prompt"
    if param == "logprobs" and "top_logprobs" in fields:
        return "top_logprobs"
    if param is None and _GRAMMAR.search(message):
        return next((f for f in _GRAMMAR_FIELDS if f in fields), None)
    if param is None:
        first_word = _FIELD.match(message)
        return first_word[0] if first_word and first_word[0] in fields else None
    return param


async def answer_http_exception(_: Request, error: Exception) -> JSONResponse:
    """Answer what FastAPI itself refuses: unknown routes, methods, unreadable JSON."""
    return error_response(error)


class ErrorMiddleware:
    """Answers whatever the handlers raise, unless the answer has already begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            response = error_response(error)
            if response.status_code >= 500 and response.status_code != 503:
                logger.exception("Request failed")
            await response(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses request bodies beyond a limit, declared or not, and those that linger."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        num_bytes, is_whole = 0, False
        due_s = asyncio.get_running_loop().time() + MAX_BODY_S

        async def receive_within_limit() -> Message:
            nonlocal num_bytes, is_whole
            try:
                # What comes behind the body is the client's leaving, whenever.
                async with asyncio.timeout_at(None if is_whole else due_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"The request body took more than {MAX_BODY_S:g} s."
                ) from None
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_within_limit, send)

    def _too_large(self) -> HTTPException:
        # FastAPI turns any other exception raised while it reads a body into a 400.
        return HTTPException(
            413, f"The request body must not exceed {self._max_body_bytes} bytes."
        )


def _describe_validation(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    if not faults:
        return ApiError(400, "The request is not valid.")
    fault = faults[0]
    if fault["type"] == "json_invalid":
        reason = fault.get("ctx", {}).get("error", "it cannot be parsed")
        return ApiError(400, f"The request body is not valid JSON: {reason}.")
    cause = fault.get("ctx", {}).get("error")
    field = getattr(cause, "parameter", None) or _field_path(fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    if field is not None:
        message = f"{field}: {message}"
    elif tuple(fault["loc"]) == ("body",):
        message = "The request body must be a JSON object."
    return ApiError(400, message, field)


def _field_path(location: Sequence[str | int]) -> str | None:
    """Drop from pydantic's location what names types and unions rather than fields."""
    path = [
        str(part)
        for part in location[1:]
        if isinstance(part, int) or (_FIELD.fullmatch(part) and part not in _TYPE_NAMES)
    ]
    return ".".join(path) or None
