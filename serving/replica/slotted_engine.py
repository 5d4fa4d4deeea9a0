"""An engine with an output for each front, forwarded to it over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import os
import uuid
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle, serve

from serving.engine.compat import (
    EngineCoreProc,
    EngineCoreRequestType,
    check,
    core_client,
    get_open_zmq_ipc_path,
    maybe_register_config_serialize_by_value,
)
from serving.engine.front_names import LEASES
from serving.engine.version import SUPPORTED_VLLM
from serving.plugin import DIE_WITH_PARENT
from serving.replica.engine import TetrisEngine
from serving.replica.kinship import Kin, may_take
from serving.replica.leases import Leases
from serving.replica.merged_stats import merge_stats
from serving.replica.state_logger import StateLogger
from serving.replica.token_channel import TokenRelay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ray.serve.llm import LLMConfig


class SlottedEngine(TetrisEngine):
    """An engine with an output for each front beside the replica's own.

    Changes against `TetrisEngine`:
        `_start_async_llm_engine`: the engine core is launched with more outputs, which
            it serves by `client_index` as it serves several API servers; whoever reads
            output 0 gets all of the engine's own statistics (`engine.shared.replay`).
    """

    def __init__(self, llm_config: LLMConfig, *, num_slots: int, build: int) -> None:
        """Start nothing yet.

        Args:
            llm_config: Ray Serve's description of the deployment.
            num_slots: Outputs, the replica's own included; at least 2.
            build: As `Kin` has it.
        """
        super().__init__(llm_config)
        self._num_slots, self._build = num_slots, build
        self.leases: Leases
        self.steps: StateLogger

    async def start(self) -> None:
        """Start the engine.

        Raises:
            MovedNamesError: This vLLM is not as a replica of fronts expects it.
        """
        check(LEASES)
        await super().start()

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any
    ) -> Any:
        loop = asyncio.get_running_loop()
        addresses = [get_open_zmq_ipc_path() for _ in range(1, self._num_slots)]
        self.relay = relay = TokenRelay(
            replica=uuid.uuid4().hex,
            host=ray.util.get_node_ip_address(),
            num_seats=vllm_engine_config.scheduler_config.max_num_seqs,
            slot_addresses=addresses,
            on_message=lambda *message: loop.call_soon_threadsafe(
                self.leases.hear, *message
            ),
            dead_frame=EngineCoreProc.ENGINE_CORE_DEAD,
            serve_id=serve.get_replica_context().replica_id.unique_id,
            build=self._build,
        )
        os.environ[DIE_WITH_PARENT] = "1"
        with _launching_with(addresses):
            client = super()._start_async_llm_engine(
                vllm_engine_args, vllm_engine_config, placement_group
            )
        core, model = client.engine_core, client.model_config
        self.kin = Kin(_fingerprint_of(model), self._build)
        self.leases = Leases(
            relay,
            self._num_slots,
            add=functools.partial(core._send_input, EngineCoreRequestType.ADD),
            abort=core.abort_requests_async,
            flush=core.get_supported_tasks_async,
            may_take=functools.partial(may_take, self.kin, model.max_model_len),
        )
        relay.watch_processes(core.resources.engine_manager.sentinels())
        cache = client.vllm_config.cache_config
        num_kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self.steps = StateLogger(relay, num_kv_tokens)
        stat_loggers = client.logger_manager.stat_loggers
        merge_stats(stat_loggers)
        stat_loggers.append(self.steps)
        relay.start()
        return client

    async def describe(self) -> dict[str, Any]:
        """Return what a front needs to speak for this engine, weights excepted."""
        client = self._engine_client
        maybe_register_config_serialize_by_value()
        return {
            "vllm_version": SUPPORTED_VLLM,
            "kin": self.kin,
            "config": cloudpickle.dumps(_without_placement(client.vllm_config)),
            "args": cloudpickle.dumps(self._vllm_args),
            "supported_tasks": tuple(await client.get_supported_tasks()),
        }


@contextlib.contextmanager
def _launching_with(addresses: Sequence[str]) -> Iterator[None]:
    """Let an engine core that is launched meanwhile have more outputs."""
    original = core_client.launch_core_engines

    def launch(config: Any, executor: Any, log_stats: bool, own: Any) -> Any:
        own.outputs.extend(addresses)
        return original(config, executor, log_stats, own)

    core_client.launch_core_engines = launch
    try:
        yield
    finally:
        core_client.launch_core_engines = original


def _fingerprint_of(model: Any) -> str:
    # Its law does not depend on how long a request may get.
    of_any_length = copy.copy(model)
    of_any_length.max_model_len = 1
    parts = (SUPPORTED_VLLM, of_any_length.compute_hash(), model.tokenizer)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _without_placement(vllm_config: Any) -> Any:
    """Copy a configuration without what only Ray's executor needs."""
    copied = copy.copy(vllm_config)
    copied.parallel_config = copy.copy(vllm_config.parallel_config)
    copied.parallel_config.placement_group = None
    return copied
