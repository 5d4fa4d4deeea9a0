"""The OpenAI-compatible HTTP surface, on Ray Serve's ingress.

Changes against Ray's `OpenAiIngress`: only routes that a text model serves, a health
route, a body limit, every error as an OpenAI error object, and no middleware that
re-packs streamed chunks.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray import serve
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException
from starlette.responses import (
    JSONResponse,
    Response,
    StreamingResponse,
)

from serving.compat_ray import (
    DEFAULT_LLM_ROUTER_HTTP_TIMEOUT,
    NON_STREAMING_RESPONSE_TYPES,
    ErrorResponse,
    OpenAiIngress,
    RawRequestInfo,
    SetRequestIdMiddleware,
    _openai_json_wrapper,
    metrics_lifespan,
    session_id_from_headers,
)
from serving.front.board import (
    BoardFeed,
)
from serving.front.errors import (
    ApiError,
    BodyLimitMiddleware,
    ErrorMiddleware,
    answer_http_exception,
    came_too_late,
    describe,
    error_body,
    from_engine,
    lost_its_engine,
    reword_streamed_errors,
)
from serving.front.pages import PageRoutes
from serving.front.replica_count import ReplicaCount
from serving.front.request_body import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

logger = logging.getLogger("ray.serve")

ENDPOINTS: Final[dict[str, Callable[[FastAPI], Callable[..., Any]]]] = {
    "health": lambda app: app.get("/health"),
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "completions": lambda app: app.post("/v1/completions"),
    "chat": lambda app: app.post("/v1/chat/completions"),
    "tokenize": lambda app: app.post("/tokenize"),
    "detokenize": lambda app: app.post("/detokenize"),
}

BOARD_ENDPOINTS: Final[dict[str, Callable[[FastAPI], Callable[..., Any]]]] = {
    "chat_page": lambda app: app.get("/", include_in_schema=False),
    "board": lambda app: app.get("/board", include_in_schema=False),
    "board_events": lambda app: app.get("/board/events", include_in_schema=False),
}

_BOARD_TIMEOUT_S: Final = 5.0
_ASK_AGAIN_AFTER_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6)
"""A replica whose engine died is gone before the last."""


def build_api(max_body_bytes: int) -> FastAPI:
    """Build the web application that the ingress class is mounted on.

    Args:
        max_body_bytes: Largest request body accepted; larger ones get a 413.
    """
    app = FastAPI(title="Tetris Serve", lifespan=metrics_lifespan)
    app.add_exception_handler(RequestValidationError, answer_http_exception)
    app.add_exception_handler(HTTPException, answer_http_exception)
    # Starlette runs the middleware added last first.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=max_body_bytes)
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(SetRequestIdMiddleware)
    return app


class TetrisIngress(PageRoutes, OpenAiIngress):
    """Routes of the OpenAI API, answered by the engine replicas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Keep the handles of the engine deployments."""
        super().__init__(*args, **kwargs)
        self._started_s = int(time.time())
        app_name = serve.get_replica_context().app_name
        self._replicas = ReplicaCount(lambda: _count_engines(app_name))
        self._feed = BoardFeed(self._watch_replicas)

    async def models(self) -> Response:
        """List the models."""
        cards = [self._describe(model) for model in self._model_cards]
        return JSONResponse({"object": "list", "data": cards})

    async def model_data(self, model: str) -> Response:
        """Describe one model."""
        return JSONResponse(self._describe(await self._get_model_id(model)))

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Complete a prompt, streaming or not."""
        return await self._process_llm_request(body, "completions", request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation, streaming or not."""
        if not body.messages:
            raise ApiError(400, "messages: must hold at least one message", "messages")
        return await self._process_llm_request(body, "chat", request)

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        return await self._answer_once(body, "tokenize", request)

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Turn token ids into text."""
        return await self._answer_once(body, "detokenize", request)

    async def _process_llm_request(
        self, body: Any, call_method: str, raw_request: Request | None = None
    ) -> Response:
        chunks, first = await self._first_answer(body, call_method, raw_request)
        if isinstance(first, NON_STREAMING_RESPONSE_TYPES):
            return JSONResponse(first.model_dump())
        return StreamingResponse(_events(first, chunks), media_type="text/event-stream")

    async def _answer_once(
        self, body: Any, call_method: str, raw_request: Request
    ) -> Response:
        _, answer = await self._first_answer(body, call_method, raw_request)
        return JSONResponse(answer.model_dump())

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        """Ask a replica; whoever leaves early ends the generation too."""
        handle = self._get_configured_serve_handle(await self._get_model_id(body.model))
        about = None
        if raw_request is not None:
            session_id = session_id_from_headers(raw_request.headers)
            if session_id:
                handle = handle.options(session_id=session_id)
            about = RawRequestInfo.from_starlette_request(raw_request)
        response = getattr(handle, call_method).remote(body, about)
        try:
            async for part in response:
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            # Cut by a timeout, Serve's call would go on and hold its place.
            response.cancel()
            raise

    async def _first_answer(
        self, body: Any, call_method: str, raw_request: Request | None
    ) -> tuple[AsyncGenerator[Any, None], Any]:
        """Wait for the first answer, while a refusal can still set the HTTP status.

        Until then a request can still go to another replica if its own dies: once only
        if it ran there, for it may be what the engine died of.
        """
        waits_s = iter(_ASK_AGAIN_AFTER_S)
        was_lost = False
        while True:
            chunks = self._get_response(
                body=body, call_method=call_method, raw_request=raw_request
            )
            try:
                async with asyncio.timeout(DEFAULT_LLM_ROUTER_HTTP_TIMEOUT):
                    first = await anext(chunks, None)
                break
            except (BackPressureError, DeploymentUnavailableError) as error:
                # Serve gives our web application handlers of its own for these two,
                # which answer in plain text.
                raise describe(error) from error
            except Exception as error:
                wait_s = next(waits_s, None)
                is_lost = lost_its_engine(error)
                if wait_s is None or not (is_lost or came_too_late(error)):
                    raise
                if is_lost and was_lost:
                    raise
                was_lost = was_lost or is_lost
                logger.warning("The request's engine died; asking another replica")
                await asyncio.sleep(wait_s)
        if first is None:
            raise RuntimeError("the engine gave no answer")
        refusal = first[0] if isinstance(first, list) else first
        if isinstance(refusal, ErrorResponse):
            raise from_engine(refusal, body)
        return chunks, first

    async def _watch_replicas(self, after: Mapping[str, int]) -> list[dict[str, Any]]:
        """Ask all replicas; one that fails is left out of this look."""
        answers = [
            answer
            for handle in self._default_serve_handles.values()
            for answer in await handle.broadcast(
                "watch_board", dict(after)
            ).results_async(timeout_s=_BOARD_TIMEOUT_S, return_exceptions=True)
        ]
        return [answer for answer in answers if isinstance(answer, dict)]

    def _describe(self, model: str) -> dict[str, Any]:
        # OpenAI's clients expect a creation time, which Ray's model card lacks.
        return {**self._model_cards[model].model_dump(), "created": self._started_s}

    async def _get_model_id(self, model: str | None) -> str:
        if model is None:
            (model,) = self._model_cards
        if model not in self._model_cards:
            raise _unknown_model(model)
        return str(model)


async def _events(
    first: Any, chunks: AsyncGenerator[Any, None]
) -> AsyncGenerator[str, None]:
    """Yield server-sent events; a failure on the way becomes a last `error` event."""

    async def all_chunks() -> AsyncGenerator[Any, None]:
        yield first
        async for chunk in chunks:
            yield chunk

    try:
        async for event in _openai_json_wrapper(all_chunks()):
            yield reword_streamed_errors(event)
    except Exception as error:
        logger.exception("A stream broke off")
        yield f"data: {json.dumps(error_body(describe(error)))}\n\n"


def _unknown_model(model: str) -> ApiError:
    return ApiError(
        404, f"The model {model[:200]!r} does not exist; see /v1/models.", "model"
    )


def _count_engines(app_name: str) -> int:
    """Count the running engine replicas of one application, as Serve sees them."""
    application = serve.status().applications.get(app_name)
    if application is None:
        return 0
    return sum(
        deployment.replica_states.get("RUNNING", 0)
        for name, deployment in application.deployments.items()
        if name.startswith("TetrisServer")
    )
