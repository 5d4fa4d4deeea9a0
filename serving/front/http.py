"""The OpenAI API, answered by vLLM's own handlers in the front's process."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final

from fastapi import Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import (
    JSONResponse,
    Response,
    StreamingResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMClientError

from serving.compat_ray import DEFAULT_LLM_ROUTER_HTTP_TIMEOUT
from serving.engine.shared.replay import INTERNAL_PREFIX
from serving.front.board import (
    BoardFeed,
)
from serving.front.errors import (
    ApiError,
    describe,
    error_body,
    from_engine,
    reword_streamed_errors,
)
from serving.front.fleet_client import FleetClient
from serving.front.metrics import FrontMetrics
from serving.front.pages import PageRoutes
from serving.front.replica_count import ReplicaCount
from serving.front.request_body import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from serving.front.vllm_app import build_app_state
from serving.replica.request_class import find_unknown_class, set_priority
from serving.replica.stream_pacing import pace_streams

logger = logging.getLogger("ray.serve")

UNSUPPORTED_WITH_SPECULATION: Final = ("min_p", "logit_bias")
"""Sampling parameters that rejection sampling in vLLM ignores, so it refuses them."""

HEADERS_WITHIN_S: Final = 10.0
"""A stream that has nothing to say yet begins then, and says that it is alive."""

FIRST_ANSWER_WITHIN_S: Final = DEFAULT_LLM_ROUTER_HTTP_TIMEOUT
"""Then an answer that has not come, or a stream without a token, is given up."""

_KEEP_ALIVE: Final = ": waiting for an engine\n\n"
_HELLO_AGAIN_S: Final = 1.0
_TICK_S: Final = 1.0
_BOARD_TIMEOUT_S: Final = 5.0

_ERROR_EVENT = re.compile(r'data: \{"error": ')


class Front(PageRoutes):
    """One front: routes of the OpenAI API over leased engine replicas."""

    async def __init__(  # type: ignore[misc]  # Ray awaits constructors
        self,
        engines: DeploymentHandle,
        *,
        model_card: Mapping[str, Any],
        policy_name: str,
        class_priorities: Mapping[str, int | None],
        stream_interval_ms: float,
        min_replicas: int,
        max_ongoing_requests: int,
        max_queued_requests: int,
    ) -> None:
        """Build vLLM's handlers from what a replica says; waits for the first one.

        Args:
            engines: The engine replicas.
            model_card: How `/v1/models` describes the model.
            policy_name: The verification policy.
            class_priorities: vLLM priority by name of request class, None for a class
                without one.
            stream_interval_ms: Least time between two chunks of a stream.
            min_replicas: Replicas there are, connected or not.
            max_ongoing_requests: Requests one replica takes.
            max_queued_requests: Requests that may wait for one.
        """
        self._engines = engines
        self._model_card = {**model_card, "created": int(time.time())}
        self._policy_name = policy_name
        self._class_priorities = class_priorities
        pace_streams(1e-3 * stream_interval_ms)
        self._replicas = ReplicaCount(self._count_engines)
        self._feed = BoardFeed(self._watch_replicas)
        leases = engines.options(stream=True).lease
        hello = await self._say_hello()

        def has_room(num_requests: int, num_replicas: int) -> bool:
            replicas = max(num_replicas, min_replicas)
            limit = replicas * max_ongoing_requests + max_queued_requests
            return num_requests < limit

        self._client = FleetClient(
            front=uuid.uuid4().bytes,
            fingerprint=hello["fingerprint"],
            supported_tasks=hello["supported_tasks"],
            open_stream=leases.remote,
            has_room=has_room,
        )
        self._metrics = FrontMetrics()
        self._client.on_replay = self._metrics.count_replay
        self._state = await build_app_state(hello, self._client)
        self._ticking = asyncio.create_task(self._tick())

    def check_health(self) -> None:
        """Let Serve replace a front whose output loop has ended.

        Raises:
            RuntimeError: It has.
        """
        if self._state.engine_client.errored:
            raise RuntimeError("the front's output loop has ended")

    async def models(self) -> Response:
        """List the models."""
        return JSONResponse({"object": "list", "data": [self._model_card]})

    async def model_data(self, model: str) -> Response:
        """Describe one model."""
        self._check_model(model)
        return JSONResponse(self._model_card)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Complete a prompt, streaming or not."""
        serving = self._state.openai_serving_completion
        return await self._generate(body, request, serving.create_completion)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation, streaming or not."""
        if not body.messages:
            raise ApiError(400, "messages: must hold at least one message", "messages")
        serving = self._state.openai_serving_chat
        return await self._generate(body, request, serving.create_chat_completion)

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Turn a prompt or a conversation into token ids."""
        self._check_model(body.model)
        serving = self._state.serving_tokenization
        return await _answer(body, request, serving.create_tokenize)

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Turn token ids into text."""
        self._check_model(body.model)
        serving = self._state.serving_tokenization
        return await _answer(body, request, serving.create_detokenize)

    async def _generate(
        self, body: Any, request: Request, create: Callable[..., Awaitable[Any]]
    ) -> Response:
        self._check_model(body.model)
        self._prepare(body)
        answer = await _ask(body, request, create)
        if isinstance(answer, AsyncGenerator):
            return await _stream(body, answer)
        return JSONResponse(answer.model_dump())

    def _prepare(self, body: Any) -> None:
        """Check a request, and take from it what only fronts may say to engines."""
        unknown = find_unknown_class(body, self._class_priorities)
        if unknown is not None:
            raise ApiError(400, unknown, "vllm_xargs")
        if self._policy_name != "none":
            for field in UNSUPPORTED_WITH_SPECULATION:
                if getattr(body, field, None):
                    raise ApiError(
                        400,
                        f"{field} cannot be combined with speculative decoding; leave "
                        f"{field} out, or serve the model with policy none",
                        field,
                    )
        if body.vllm_xargs:
            body.vllm_xargs = {
                name: value
                for name, value in body.vllm_xargs.items()
                if not name.startswith(INTERNAL_PREFIX)
            }
        set_priority(body, self._class_priorities)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model_card["id"]:
            raise ApiError(
                404,
                f"The model {model[:200]!r} does not exist; see /v1/models.",
                "model",
            )

    async def _say_hello(self) -> dict[str, Any]:
        while True:
            try:
                answer: dict[str, Any] = await self._engines.hello.remote()
                return answer
            except Exception as error:
                logger.warning("No replica says hello yet: %r", error)
                await asyncio.sleep(_HELLO_AGAIN_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._client.fail_overdue()
            self._metrics.record(self._client)

    async def _watch_replicas(self, after: Mapping[str, int]) -> list[dict[str, Any]]:
        """Ask all replicas; one that fails is left out of this look."""
        answers = await self._engines.broadcast(
            "watch_board", dict(after)
        ).results_async(timeout_s=_BOARD_TIMEOUT_S, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, dict)]

    def _count_engines(self) -> int:
        """Count the running engine replicas, as Serve sees them."""
        app_name = serve.get_replica_context().app_name
        application = serve.status().applications.get(app_name)
        if application is None:
            return 0
        engines = application.deployments[self._engines.deployment_name]
        return int(engines.replica_states.get("RUNNING", 0))


async def _ask(
    body: Any, request: Request, create: Callable[..., Awaitable[Any]]
) -> Any:
    """Ask one of vLLM's handlers.

    Raises:
        ApiError: It refuses.
        TimeoutError: It takes too long; the request has ended in its engine too.
    """
    try:
        async with asyncio.timeout(FIRST_ANSWER_WITHIN_S):
            answer = await create(body, raw_request=request)
    except (ValueError, VLLMClientError, GracefulHTTPError) as error:
        make_refusal = create.__self__.create_error_response  # type: ignore[attr-defined]  # a bound method
        raise from_engine(make_refusal(error), body) from error
    if isinstance(answer, ErrorResponse):
        raise from_engine(answer, body)
    return answer


async def _answer(
    body: Any, request: Request, create: Callable[..., Awaitable[Any]]
) -> Response:
    return JSONResponse((await _ask(body, request, create)).model_dump())


async def _stream(body: Any, chunks: AsyncGenerator[str, None]) -> Response:
    """Begin a stream, if possible once it is known whether it is an error."""
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
