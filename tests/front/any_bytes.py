"""Any bytes, where a front reads what clients send and vLLM streams.

`test_any_bytes.py` has Hypothesis choose them, `fuzz_bytes.py` atheris.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import httpx
from fastapi import FastAPI
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
FAULT: Final = f"data: {json.dumps(error_body(describe(RuntimeError())))}\n\n"
"""How a stream says that something of the server's own failed."""


class Bodies:
    """The real web application, whose routes check a body and do nothing with it."""

    def __init__(self) -> None:
        api = build_api(1 << 20)
        for path, kind in KINDS.items():
            api.post(path)(_check(kind, generates=path.startswith("/v1")))
        self._client = _client_of(api)
        self._runner = asyncio.Runner()

    def post(self, content: bytes) -> dict[str, int]:
        """Send a body to every route that takes one, and return their statuses."""
        return self._runner.run(self._post(content))

    def close(self) -> None:
        """Give up the event loop."""
        self._runner.close()

    async def _post(self, content: bytes) -> dict[str, int]:
        statuses = {}
        for path in KINDS:
            headers = {"Content-Type": "application/json"}
            answer = await self._client.post(path, content=content, headers=headers)
            assert answer.status_code < 500, (path, content, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
            statuses[path] = answer.status_code
        return statuses


def stream(content: bytes) -> None:
    """See that what a model says passes, and what vLLM says of a failure does not."""
    text = content.decode("utf-8", "replace")
    answer = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    chunk = f"data: {answer}\n\n"
    assert reword_streamed_errors(chunk) == chunk
    info = ErrorInfo(message=text, type="InternalServerError", code=500)
    failure = json.dumps(ErrorResponse(error=info).model_dump())
    assert reword_streamed_errors(f"data: {failure}\n\n") == FAULT


def _check(kind: Any, *, generates: bool) -> Any:
    front = object.__new__(Front)
    front._classes, front._policy_name = {}, "tetris"

    async def check(body: Any) -> dict[str, Any]:
        if generates:
            front._prepare(body)
        return {}

    check.__annotations__["body"] = kind
    return check


def _client_of(api: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")
