"""The engine replica: Ray Serve's LLM server with speculation metrics and checks."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import psutil
import ray
from ray import serve
from ray.serve.llm import LLMConfig
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from serving.compat_ray import (
    CallbackBase,
    ErrorInfo,
    ErrorResponse,
    LLMServer,
    VLLMEngine,
)
from serving.engine.compat import check
from serving.engine.compat_names import SERVER, UNIPROC_EXECUTOR
from serving.replica.capacity import capacity_reader
from serving.replica.engine_gone import EngineGoneError
from serving.replica.metrics import (
    CAPACITY_PERIOD_S,
    SNAPSHOT_PERIOD_S,
    CapacityMetrics,
    SnapshotRecorder,
    SpeculationMetrics,
    poll_snapshots,
)
from serving.replica.request_class import find_unknown_class, set_priority
from serving.replica.serve_log import keep_serve_log
from serving.replica.stream_pacing import pace_streams
from serving.replica.warm_start import (
    ServePeers,
    count_warm_start,
    package_state,
    start_warm,
)
from serving.replica.watchdog import EngineWatch
from serving.settings.gguf_models import convert_alike

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger("ray.serve")

_UNSUPPORTED_WITH_SPECULATION: Final = ("min_p", "logit_bias")
"""Sampling parameters that rejection sampling in vLLM ignores, so it refuses them."""


_SUM_UP_PERIOD_S: Final = 10.0
"""As vLLM's own server does."""

_ENGINE_CHECK_S: Final = 0.2
_LAST_WORDS_S: Final = 1.0
"""Time to tell the requests that ended with the engine."""


class SkipLocalDownload(CallbackBase):
    """Skips the download step for models that are local folders.

    Ray starts a worker process for it that imports vLLM to find nothing to do, which
    costs about ten seconds of start-up on two cores. What there is to do instead is
    converting GGUF files, if the deployment was built on another machine.
    """

    async def on_before_node_init(self) -> None:
        """Switch the download step off.

        Raises:
            GgufError: A GGUF file is missing on this machine, or another one.
        """
        self.ctx.run_init_node = False
        for name, folder in self.kwargs["gguf_files"].items():
            await asyncio.to_thread(convert_alike, name, folder, logger.info)


class TetrisEngine(VLLMEngine):
    """Ray's vLLM engine for vLLM 0.32, with what a replica asks of it besides.

    Changes against Ray's `VLLMEngine`:
        Tokenization is found: Ray 2.60 looks for `openai_serving_tokenization`, which
        this vLLM calls `serving_tokenization`, and would refuse every such request.
        One CPU worker runs in the engine core's process (`_start_async_llm_engine`).
    """

    async def start(self) -> None:
        """Start the engine.

        Raises:
            MovedNamesError: This vLLM is not as a replica expects it.
        """
        check(SERVER)
        await super().start()
        self._oai_serving_tokenization = self._app_state.serving_tokenization

    def _start_async_llm_engine(
        self,
        vllm_engine_args: "AsyncEngineArgs",
        vllm_engine_config: "VllmConfig",
        placement_group: "PlacementGroup",
    ) -> "EngineClient":
        """Start the engine, on the CPU without a process for its only worker.

        An engine core waits for its worker's process by spinning, which takes a core
        from the model, and on the CPU the cores are the accelerator. vLLM insists on
        the process to set OpenMP up in it; a replica's environment has done so already.
        """
        parallel = vllm_engine_config.parallel_config
        if current_platform.is_cpu() and parallel.world_size == 1:
            parallel.distributed_executor_backend = UNIPROC_EXECUTOR
        return super()._start_async_llm_engine(
            vllm_engine_args, vllm_engine_config, placement_group
        )

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process ended or failed for good."""
        return bool(self._engine_client.errored)

    async def answer(self) -> None:
        """Return once the engine's process has answered anything."""
        await self._engine_client.is_sleeping()

    async def sum_up_stats(self) -> None:
        """Have vLLM log its figures; until then it keeps some of every step."""
        await self._engine_client.do_log_stats()

    async def take_snapshot(self) -> dict[str, Any]:
        """Fetch the scheduler's cumulative figures from the engine's process.

        Raises:
            RuntimeError: The engine runs without our scheduler, or not at all.
        """
        core = self._engine_client.engine_core
        snapshot: dict[str, Any] = await core.call_utility_async("tetris_snapshot")
        if not snapshot:
            raise RuntimeError("the engine runs without the TETRIS scheduler")
        return snapshot

    async def export_planner_state(self) -> dict[str, Any]:
        """Fetch what the planner learnt; {} if nothing."""
        core = self._engine_client.engine_core
        state: dict[str, Any] = await core.call_utility_async("tetris_export_state")
        return state

    async def import_planner_state(self, state: dict[str, Any]) -> None:
        """Let the planner start from another engine's state.

        Raises:
            ValueError: The planner refuses it and goes on unchanged.
        """
        core = self._engine_client.engine_core
        refusal: str = await core.call_utility_async("tetris_import_state", state)
        if refusal:
            raise ValueError(refusal)

    async def watch_board(self, after: int, *, with_text: bool) -> dict[str, Any]:
        """Fetch the newest steps, and keep the engine recording.

        Args:
            after: Number of the last step seen.
            with_text: Add `draft_text` to each request.

        Returns:
            As `BoardRecorder.watch`; {} from an engine without our scheduler.
        """
        core = self._engine_client.engine_core
        seen: dict[str, Any] = await core.call_utility_async(
            "tetris_watch_board", after, with_text
        )
        if with_text:
            tokenizer = cached_tokenizer_from_config(self._engine_client.model_config)
            for step in seen.get("steps", ()):
                for request in step["requests"]:
                    ids = request.pop("draft_ids")
                    request["draft_text"] = [tokenizer.decode([one]) for one in ids]
        return seen


class TetrisServer(LLMServer):
    """One replica: a vLLM engine behind Ray Serve.

    Changes against Ray's `LLMServer`:
        `start` also takes over what a running replica has learnt, and polls the
        engine's speculation counters, about once a second, and what other processes
        leave of the device.
        Requests that speculation cannot serve are refused with the field's name.
        vLLM is asked to log its figures, without which they grow.
        Streams are handed on at once, unless tokens come too often (`pace_streams`).
        A replica ends soon after its engine, dead or hung (`_follow_engine`).
    """

    _default_engine_cls = TetrisEngine

    async def __init__(  # type: ignore[misc]  # Ray awaits constructors
        self,
        llm_config: LLMConfig,
        *,
        device: str,
        policy_name: str,
        has_snapshots: bool,
        planner_key: str,
        class_priorities: Mapping[str, int | None],
        hang_timeout_s: float,
        load_timeout_s: float,
        stream_interval_s: float,
        board_text: bool = False,
        last_words_s: float = _LAST_WORDS_S,
        **kwargs: Any,
    ) -> None:
        """Start the engine; returns when it can serve.

        Args:
            llm_config: Ray Serve's description of the deployment.
            device: `cpu` or `gpu`.
            policy_name: The verification policy.
            has_snapshots: Whether our scheduler runs in the engine.
            planner_key: What another replica must agree in to share its planner's
                state.
            class_priorities: vLLM priority by name of request class, None for a class
                without one.
            hang_timeout_s: Longest silence of an engine that works, seconds.
            load_timeout_s: Longest silence of one that loads, seconds.
            stream_interval_s: Least time between two chunks of a stream, seconds.
            board_text: Whether the board may show draft tokens as text.
            last_words_s: How long a replica whose engine died still answers, seconds.
            **kwargs: For Ray's server.
        """
        self._board_text = board_text
        self._last_words_s = last_words_s
        self._class_priorities = class_priorities
        self._device = device
        self._policy_name = policy_name
        self._planner_key = planner_key
        self._has_snapshots = has_snapshots
        self._background: list[asyncio.Task[None]] = []
        self._watch = EngineWatch(hang_timeout_s, load_timeout_s)
        self._is_ending = False
        pace_streams(stream_interval_s)
        await super().__init__(llm_config, **kwargs)

    async def start(self) -> None:
        """Start the engine, warm if it can be, and the polling of its counters."""
        with keep_serve_log():
            await super().start()
        if self._has_snapshots:
            count_warm_start(
                self._policy_name,
                await start_warm(
                    ServePeers(), self.engine.import_planner_state, self._planner_key
                ),
            )
            self._poll(self.engine.take_snapshot, SpeculationMetrics(self._policy_name))
        self._background.append(asyncio.create_task(self._follow_engine()))
        self._background.append(asyncio.create_task(self._sum_up_stats()))
        reader = capacity_reader(self._device, [str(one) for one in ray.get_gpu_ids()])
        self._poll(
            lambda: asyncio.to_thread(reader.read), CapacityMetrics(), CAPACITY_PERIOD_S
        )

    def _poll(
        self,
        take: Callable[[], Awaitable[Mapping[str, Any]]],
        recorder: SnapshotRecorder,
        period_s: float = SNAPSHOT_PERIOD_S,
    ) -> None:
        polling = poll_snapshots(take, recorder, period_s)
        self._background.append(asyncio.create_task(polling))

    async def _sum_up_stats(self) -> None:
        while True:
            await asyncio.sleep(_SUM_UP_PERIOD_S)
            try:
                await self.engine.sum_up_stats()
            except Exception:
                logger.exception("vLLM's figures of every step are kept for longer")

    async def _follow_engine(self) -> None:
        """End this process, and all below it, when its engine has died or hangs.

        Serve would find out by three failed health checks in a row. Until then a
        replica that refuses at once looks like the least busy one and draws every
        request; and for as long as a drain may take, it would wait for requests that
        a hung engine never finishes, and the next one for the device that it holds.
        Of a process that has ended, Serve's routers hear at once.
        """
        hanging = asyncio.create_task(self._watch.wait_until_hung(self.engine.answer))
        while not (self.engine.is_dead or hanging.done()):
            await asyncio.sleep(_ENGINE_CHECK_S)
        self._is_ending = True
        what = f"is silent for {hanging.result():.0f} s" if hanging.done() else "died"
        logger.error(f"The engine {what}; this replica ends, and Serve starts another")
        await asyncio.sleep(self._last_words_s)
        for handler in logger.handlers:
            handler.flush()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(1)

    async def sleep(self, **kwargs: Any) -> None:
        """Put the engine to sleep, however long it takes to move its weights."""
        with self._watch.loading():
            await super().sleep(**kwargs)

    async def wakeup(self, **kwargs: Any) -> None:
        """Wake the engine, however long it takes to load its weights."""
        with self._watch.loading():
            await super().wakeup(**kwargs)

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every worker, which may be to load weights."""
        with self._watch.loading():
            results: list[Any] = await super().collective_rpc(*args, **kwargs)
        return results

    async def export_planner_state(self) -> dict[str, Any]:
        """Return what this replica's planner learnt, for a new one."""
        return package_state(
            self._planner_key, await self.engine.export_planner_state()
        )

    async def watch_board(self, after: Mapping[str, int]) -> dict[str, Any]:
        """Return this replica's newest steps for the board.

        Args:
            after: Number of the last step seen, by replica.
        """
        replica = serve.get_replica_context().replica_id.unique_id
        seen: dict[str, Any] = {}
        if self._has_snapshots:
            seen = await self.engine.watch_board(
                after.get(replica, 0), with_text=self._board_text
            )
        return {"replica": replica, "policy": self._policy_name, **seen}

    async def _run_request(
        self, request: Any, *, engine_method: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        if self._is_ending or self.engine.is_dead:
            raise EngineGoneError
        refusal = self._refuse(request)
        if refusal is not None:
            return _only(refusal)
        set_priority(request, self._class_priorities)
        stream: AsyncGenerator[Any, None] = await super()._run_request(
            request, engine_method=engine_method, **kwargs
        )
        return stream

    def _refuse(self, request: Any) -> ErrorResponse | None:
        unknown = find_unknown_class(request, self._class_priorities)
        if unknown is not None:
            return _bad_request(unknown, "vllm_xargs")
        if self._policy_name == "none":
            return None
        for field in _UNSUPPORTED_WITH_SPECULATION:
            if getattr(request, field, None):
                return _bad_request(
                    f"{field} cannot be combined with speculative decoding; leave "
                    f"{field} out, or serve the model with policy none",
                    field,
                )
        return None


def _bad_request(message: str, param: str) -> ErrorResponse:
    return ErrorResponse(
        error=ErrorInfo(message=message, type="BadRequestError", param=param, code=400)
    )


async def _only(item: Any) -> AsyncGenerator[Any, None]:
    yield item
