"""vLLM's own request handlers over a fleet of engines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import xgrammar
from ray import cloudpickle
from starlette.datastructures import State
from vllm.tokenizers import cached_tokenizer_from_config

from serving.engine.compat import (
    AsyncLLM,
    EngineCoreClient,
    Executor,
    RayPrometheusStatLogger,
    check,
    init_app_state,
)
from serving.engine.front_names import FRONT
from serving.engine.version import SUPPORTED_VLLM
from serving.replica.serve_log import keep_serve_log

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from serving.front.fleet_client import FleetClient


async def build_app_state(hello: Mapping[str, Any], client: FleetClient) -> State:
    """Build vLLM's request handlers, as its own server has them.

    The configuration is the engine's, drafter and quantization included, because vLLM
    refuses by it what an engine would ignore. Nothing of it is executed here: there are
    no weights, and no device is looked for.

    Args:
        hello: From `EngineServer.hello`.
        client: Stands in for the engine core.

    Returns:
        What vLLM keeps as its web application's state.

    Raises:
        RuntimeError: The engines run another vLLM.
        MovedNamesError: This vLLM is not as the front expects it.
    """
    check(FRONT)
    if hello["vllm_version"] != SUPPORTED_VLLM:
        raise RuntimeError(
            f"the engines run vLLM {hello['vllm_version']}, this front "
            f"{SUPPORTED_VLLM}; give both the same image"
        )
    config = cloudpickle.loads(hello["config"])
    send_images_whole(config)
    with keep_serve_log(), _client_is(client):
        llm = AsyncLLM(
            vllm_config=config,
            executor_class=Executor,
            log_stats=False,
            log_requests=False,
            stat_loggers=[RayPrometheusStatLogger],
        )
    client.failover.on_failure = _failing(llm)
    client.on_refused = _forgetting(llm)
    state = State()
    await init_app_state(
        llm,
        state,
        cloudpickle.loads(hello["args"]),
        supported_tasks=hello["supported_tasks"],
    )
    return state


def send_images_whole(config: Any) -> None:
    """Have images, and whatever else is no text, sent with each request.

    vLLM sends what its one engine has had before by its name alone; of a front's
    engines another may come to have the request.

    Args:
        config: A front's `VllmConfig`.
    """
    multimodal = config.model_config.multimodal_config
    if multimodal is not None:
        multimodal.mm_processor_cache_gb = 0


def describe_tokenizer(app_state: State) -> str:
    """Return what engines compile grammars for, as xgrammar serialises it.

    Args:
        app_state: From `build_app_state`.

    Raises:
        Exception: xgrammar does not know such a tokenizer.
    """
    model_config = app_state.engine_client.model_config
    tokenizer = xgrammar.TokenizerInfo.from_huggingface(
        cached_tokenizer_from_config(model_config),
        vocab_size=model_config.get_vocab_size(),
    )
    return str(tokenizer.serialize_json())


@contextlib.contextmanager
def _client_is(client: FleetClient) -> Iterator[None]:
    """Let an `AsyncLLM` that is made meanwhile have this client."""
    original = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: client)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original


def _failing(llm: Any) -> Any:
    """Return what ends a request, and the others of its `n`, with an error."""

    def fail(request_id: str, error: Exception) -> None:
        processor = llm.output_processor
        state = processor.request_states.get(request_id)
        if state is None:
            return
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        others = processor.abort_requests([whole], internal=True)
        state.queue.put(error)
        # The caller is in the middle of its own books.
        asyncio.get_running_loop().call_soon(
            asyncio.ensure_future, llm.engine_core.abort_requests_async(others)
        )

    return fail


def _forgetting(llm: Any) -> Any:
    """Return what removes a request that is refused from what vLLM keeps of it.

    vLLM notes a request before it asks the client to take it. Of one that is not taken
    it removes only those of an `n`.
    """

    def forget(request_id: str) -> None:
        processor = llm.output_processor
        state = processor.request_states.get(request_id)
        if state is not None and state.parent_req is None:
            processor.abort_requests([request_id], internal=True)

    return forget
