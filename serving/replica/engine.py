"""Ray Serve's vLLM engine, with what a replica asks of it besides."""

import functools
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from serving.compat_ray import VLLMEngine
from serving.engine.compat import check
from serving.engine.compat_names import UNIPROC_EXECUTOR
from serving.engine.front_names import SERVER
from serving.replica.draft_texts import DraftTexts

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import EngineClient


class TetrisEngine(VLLMEngine):
    """Ray's vLLM engine for vLLM 0.32, with what a replica asks of it besides.

    Changes against Ray's `VLLMEngine`: one CPU worker runs in the engine core's process
    (`_start_async_llm_engine`).
    """

    async def start(self) -> None:
        """Start the engine.

        Raises:
            MovedNamesError: This vLLM is not as a replica expects it.
        """
        check(SERVER)
        await super().start()

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

    async def change_policy(self, section: dict[str, Any]) -> None:
        """Put another policy in charge of the engine.

        Raises:
            ValueError: It cannot run it, and goes on unchanged.
        """
        core = self._engine_client.engine_core
        refusal: str = await core.call_utility_async("tetris_change_policy", section)
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
            self._draft_texts.write(seen.get("steps", ()))
        return seen

    @functools.cached_property
    def _draft_texts(self) -> DraftTexts:
        config = self._engine_client.model_config
        return DraftTexts(cached_tokenizer_from_config(config).decode)
