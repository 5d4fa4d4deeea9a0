"""One front: the OpenAI API over HTTP, answered by vLLM's own handlers."""

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from serving.compat_ray import SetRequestIdMiddleware, metrics_lifespan
from serving.engine.shared.replay import INTERNAL_PREFIX
from serving.front.access import AccessMiddleware, AccessOptions
from serving.front.answers import ask, begin_stream
from serving.front.board import BoardFeed
from serving.front.errors import (
    ApiError,
    BodyLimitMiddleware,
    ErrorMiddleware,
    answer_http_exception,
)
from serving.front.fleet_client import FleetClient
from serving.front.grammar_time import GrammarTime
from serving.front.live_limits import LiveLimits
from serving.front.metrics import FrontMetrics
from serving.front.pages import PageRoutes
from serving.front.refusal import retry_after_as_noted
from serving.front.replica_count import ReplicaCount
from serving.front.request_body import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from serving.front.request_class import (
    DEADLINE_XARG,
    ClassShare,
    claim_class,
    find_unknown_class,
    set_deadline,
    set_priority,
)
from serving.front.request_limits import strip_internal
from serving.front.running_replicas import running_ids
from serving.front.stream_pacing import pace_streams
from serving.front.vllm_app import build_app_state, describe_tokenizer
from serving.reloading import take_over
from serving.settings.gguf_models import convert_alike

logger = logging.getLogger("ray.serve")

Route = Callable[[FastAPI], Callable[..., Any]]

_ROUTES: Final[Mapping[str, Route]] = {
    "health": lambda api: api.get("/health"),
    "models": lambda api: api.get("/v1/models"),
    "model_data": lambda api: api.get("/v1/models/{model:path}"),
    "completions": lambda api: api.post("/v1/completions"),
    "chat": lambda api: api.post("/v1/chat/completions"),
    "tokenize": lambda api: api.post("/tokenize"),
    "detokenize": lambda api: api.post("/detokenize"),
}
_BOARD_ROUTES: Final[Mapping[str, Route]] = {
    "chat_page": lambda api: api.get("/", include_in_schema=False),
    "board": lambda api: api.get("/board", include_in_schema=False),
    "board_events": lambda api: api.get("/board/events", include_in_schema=False),
}

UNSUPPORTED_WITH_SPECULATION: Final = ("min_p", "logit_bias")
"""Sampling parameters that rejection sampling in vLLM ignores, so it refuses them."""

_HELLO_AGAIN_S: Final = 1.0
_TICK_S: Final = 1.0
_BOARD_TIMEOUT_S: Final = 5.0


def build_front(
    max_body_bytes: int, *, has_board: bool, access: AccessOptions | None
) -> type["Front"]:
    """Return the class that Serve deploys, mounted on a web application of its own.

    Args:
        max_body_bytes: Largest request body accepted; larger ones get a 413.
        has_board: Whether there are the live board and the chat page.
        access: Who may call; None for anybody.
    """
    api = build_api(max_body_bytes, access)
    routes = {**_ROUTES, **(_BOARD_ROUTES if has_board else {})}
    mounted = {name: route(api)(getattr(Front, name)) for name, route in routes.items()}
    front: type[Front] = serve.ingress(api)(type("Front", (Front,), mounted))
    return front


def build_api(max_body_bytes: int, access: AccessOptions | None = None) -> FastAPI:
    """Build the web application, without routes: errors, limits, ids, metrics.

    Args:
        max_body_bytes: Largest request body accepted; larger ones get a 413.
        access: Who may call; None for anybody.
    """
    api = FastAPI(title="Tetris Serve", lifespan=metrics_lifespan)
    api.add_exception_handler(RequestValidationError, answer_http_exception)
    api.add_exception_handler(HTTPException, answer_http_exception)
    # Starlette runs the middleware added last first.
    api.add_middleware(BodyLimitMiddleware, max_body_bytes=max_body_bytes)
    if access is not None:
        api.add_middleware(AccessMiddleware, options=access)
    api.add_middleware(ErrorMiddleware)
    api.add_middleware(SetRequestIdMiddleware)
    return api


class Front(PageRoutes):
    """Routes of the OpenAI API over leased engine replicas."""

    async def __init__(  # type: ignore[misc]  # Ray awaits constructors
        self,
        engines: DeploymentHandle,
        *,
        model_card: Mapping[str, Any],
        build: int,
        policy_name: str,
        classes: Mapping[str, ClassShare],
        stream_interval_ms: float,
        min_replicas: int,
        max_ongoing_requests: int,
        max_queued_requests: int,
        gguf_files: Mapping[str, str],
    ) -> None:
        """Build vLLM's handlers from what a replica says; waits for the first one.

        Args:
            engines: The engine replicas.
            model_card: How `/v1/models` describes the model.
            build: As `Kin` has it.
            policy_name: The verification policy.
            classes: How classes of requests are treated, by name.
            stream_interval_ms: Least time between two chunks of a stream.
            min_replicas: Replicas there are, connected or not.
            max_ongoing_requests: Requests one replica takes.
            max_queued_requests: Requests that may wait for one, in all fronts.
            gguf_files: The folder that must be here, converted, by GGUF file: the
                tokenizer is in it.
        """
        # Where no log can be written Python says so on stderr, which Serve makes a log
        # as well, until that recurs too deep. Nobody's answer may end of it.
        logging.raiseExceptions = False
        self._engines = engines
        created = int(time.time())  # noqa: TID251 - a date
        self._model_card = {**model_card, "created": created}
        self._policy_name = policy_name
        self._limits = LiveLimits(
            dict(classes), min_replicas, max_ongoing_requests, max_queued_requests
        )
        pace_streams(1e-3 * stream_interval_ms)
        self._replicas = ReplicaCount(
            self._count_engines, may_be_none=lambda: self._limits.min_replicas == 0
        )
        self._feed = BoardFeed(self._watch_replicas)
        for name, folder in gguf_files.items():
            await asyncio.to_thread(convert_alike, name, folder, logger.info)
        leases = engines.options(stream=True).lease
        hello = await self._say_hello(build)
        self._client = FleetClient(
            front=uuid.uuid4().bytes,
            kin=hello["kin"],
            supported_tasks=hello["supported_tasks"],
            open_stream=leases.remote,
            max_requests=self._limits.max_requests,
            classes=self._limits.classes,
            running_ids=running_ids,
        )
        self._metrics = FrontMetrics()
        self._client.failover.on_replay = self._metrics.count_replay
        self._client.routing.on_choice = self._metrics.count_choice
        self._client.admission.on_refusal = self._metrics.count_refusal
        self._state = await build_app_state(hello, self._client)
        self._grammars = GrammarTime(functools.partial(describe_tokenizer, self._state))
        self._ticking = asyncio.create_task(self._tick())

    async def reconfigure(self, user_config: Any) -> None:
        """Take over other classes and limits, without a new front."""
        await take_over(user_config, self._limits.take)

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
        answer = await ask(body, request, serving.create_tokenize)
        return JSONResponse(answer.model_dump())

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Turn token ids into text."""
        self._check_model(body.model)
        serving = self._state.serving_tokenization
        answer = await ask(body, request, serving.create_detokenize)
        return JSONResponse(answer.model_dump())

    async def _generate(
        self, body: Any, request: Request, create: Callable[..., Awaitable[Any]]
    ) -> Response:
        self._check_model(body.model)
        self._prepare(body)
        await self._grammars.check(body)
        with retry_after_as_noted():
            answer = await ask(body, request, create)
            if isinstance(answer, AsyncGenerator):
                return await begin_stream(body, answer)
        return JSONResponse(answer.model_dump())

    def _prepare(self, body: Any) -> None:
        """Check a request, and take from it what only fronts may say to engines."""
        classes = self._limits.classes
        claim_class(body, classes)
        unknown = find_unknown_class(body, classes)
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
                for name, value in strip_internal(body.vllm_xargs).items()
                if not name.startswith(INTERNAL_PREFIX)
            }
        set_priority(body, classes)
        wrong = set_deadline(body)
        if wrong is not None:
            raise ApiError(400, wrong, DEADLINE_XARG)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model_card["id"]:
            raise ApiError(
                404,
                f"The model {model[:200]!r} does not exist; see /v1/models.",
                "model",
            )

    async def _say_hello(self, build: int) -> dict[str, Any]:
        while True:
            try:
                answer: dict[str, Any] = await self._engines.hello.remote(build)
                if answer:
                    return answer
            except Exception as error:
                logger.warning("No replica says hello yet: %r", error)
            await asyncio.sleep(_HELLO_AGAIN_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._client.fail_overdue()
            self._client.tell_waiting()
            self._metrics.record(self._client)

    async def _watch_replicas(self, after: Mapping[str, int]) -> list[dict[str, Any]]:
        """Ask all replicas; one that fails is left out of this look.

        Ray collects the answers of all or of none: a replica whose process stands still
        blinds the board until Serve replaces it.
        """
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
