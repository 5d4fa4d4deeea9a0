"""The engine replica: leases, metrics, warm start, and an end with its engine."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import ray
from ray import serve
from ray.serve.llm import LLMConfig

from serving.adapters import policy_config_of
from serving.compat_ray import RUNNING_REQUESTS_KEY, LLMServer, usage_stats_enabled
from serving.reloading import take_over
from serving.replica.capacity import capacity_reader
from serving.replica.engine_gone import EngineGoneError
from serving.replica.kinship import Kin
from serving.replica.metrics import (
    CAPACITY_PERIOD_S,
    SNAPSHOT_PERIOD_S,
    CapacityMetrics,
    SnapshotRecorder,
    SpeculationMetrics,
    count_begun,
    poll_snapshots,
)
from serving.replica.options import ReplicaOptions
from serving.replica.pace_stats import stats_of
from serving.replica.serve_log import keep_serve_log
from serving.replica.slotted_engine import SlottedEngine
from serving.replica.warm_start import (
    ServePeers,
    WarmStart,
    count_warm_start,
    package_state,
)
from serving.replica.watchdog import EngineWatch, end_process
from serving.settings.live import LiveSettings

logger = logging.getLogger("ray.serve")

_SUM_UP_PERIOD_S: Final = 10.0
"""As vLLM's own server does."""

_ENGINE_CHECK_S: Final = 0.2

_BOARD_S: Final = 3.0
"""How long the board waits for an engine; less than a front waits for all replicas."""


class EngineServer(LLMServer):
    """One replica: a vLLM engine that works for fronts.

    Changes against Ray's `LLMServer`:
        Fronts call `hello` and `lease`; nobody calls the OpenAI methods.
        `start` also takes over what a running replica has learnt, and polls the
        engine's speculation counters, about once a second, and what other processes
        leave of the device.
        `_start_engine` tells Ray's usage statistics of the model only where they are
        wanted; the actor that hears of it would be started all the same.
        vLLM is asked to log its figures, without which they grow.
        A replica ends with its engine, dead or hung (`_follow_engine`).
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits constructors
        self, llm_config: LLMConfig, *, options: ReplicaOptions, num_slots: int
    ) -> None:
        """Start the engine; returns when it can serve.

        Args:
            llm_config: Ray Serve's description of the deployment.
            options: What of the settings is not in it.
            num_slots: Fronts that may be connected at a time, plus one.
        """
        # As in a front: no stream may end because a log cannot be written.
        logging.raiseExceptions = False
        self._options = self._started_with = options
        self._background: list[asyncio.Task[None]] = []
        self._watch = EngineWatch(options.hang_timeout_s, options.load_timeout_s)
        await super().__init__(
            llm_config,
            engine_cls=functools.partial(
                SlottedEngine, num_slots=num_slots, build=options.build
            ),
        )

    async def hello(self, build: int) -> dict[str, Any]:
        """Tell a front of the same build what it needs to speak for these engines.

        One of another build gets nothing: while an update replaces engine by engine, it
        has to wait for the first of its own.
        """
        if build != self._options.build:
            return {}
        described: dict[str, Any] = await self.engine.describe()
        return described

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler what runs here, what waits at fronts, and how fast.

        Fronts lease no more than there are seats for, so that Serve's own count, which
        this replaces, stops there.
        """
        engine = self.engine
        num_seats = engine.relay.offer.num_seats
        return {
            RUNNING_REQUESTS_KEY: engine.leases.num_wanted,
            **stats_of(engine.steps.state, num_seats),
        }

    async def lease(
        self,
        front: bytes,
        kin: Kin,
        frames: Sequence[bytes],
        alone: bool,
        wanted: str = "",
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Run one request, whose tokens go to the front's token channel.

        Args:
            front: The front's name.
            kin: The front's.
            frames: An `EngineCoreRequest`, encoded as for the engine core.
            alone: Whether it must have the engine for itself.
            wanted: The replica it is meant for; the router has read it.

        Yields:
            As `Leases.hold`.

        Raises:
            EngineGoneError: The engine is dead.
        """
        del wanted
        if self.engine.is_dead:
            raise EngineGoneError
        async for event in self.engine.leases.hold(front, kin, frames, alone=alone):
            yield event

    async def start(self) -> None:
        """Start the engine, warm if it can be, and the polling of its counters."""
        with keep_serve_log():
            await super().start()
        if self._options.has_snapshots:
            self._warm_start = WarmStart(ServePeers(), self.engine.import_planner_state)
            outcome = await self._warm_start.begin(self._options.planner_key)
            count_warm_start(self._options.policy_name, outcome)
            self._metrics = SpeculationMetrics(self._options.policy_name)
            self._poll(self.engine.take_snapshot, self._metrics)
        self.engine.leases.on_begun = count_begun()
        self._background.append(asyncio.create_task(self._follow_engine()))
        self._background.append(asyncio.create_task(self._sum_up_stats()))
        recorder = CapacityMetrics()
        reader = capacity_reader(
            self._options.device,
            [str(one) for one in ray.get_gpu_ids()],
            recorder.record_failure,
        )
        self._poll(lambda: asyncio.to_thread(reader.read), recorder, CAPACITY_PERIOD_S)

    async def _start_engine(self) -> None:
        if usage_stats_enabled():
            await super()._start_engine()
        else:
            await self.engine.start()

    async def reconfigure(self, user_config: Any) -> None:
        """Take over another policy, or other classes, without a new engine."""
        await take_over(user_config, self._take_settings)

    async def _take_settings(self, live: LiveSettings) -> None:
        policy, options = live.policy, self._options
        if policy is None:
            return
        if not options.has_snapshots:
            raise ValueError("policy: vLLM's own scheduler runs here; redeploy instead")
        section = policy_config_of(policy)
        if policy.max_draft_tokens is None:
            depth = min(policy.num_speculative_tokens, options.max_depth)
            section["max_draft_tokens"] = depth
        # By what it is now, not by how it came to it: others took another way.
        key = f"{self._started_with.planner_key} changed to {section}"
        if key == options.planner_key:
            # Serve hands it over again with any other change; what was learnt stays.
            return
        with self._watch.loading():  # It may have to compile.
            await self.engine.change_policy(section)
        self._metrics.note_policy(policy.name)
        self._options = dataclasses.replace(
            options, policy_name=policy.name, planner_key=key
        )
        outcome = await self._warm_start.go_on(key)
        if outcome is not None:
            count_warm_start(policy.name, outcome)

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
        lease; and for as long as a drain may take, it would wait for requests that
        a hung engine never finishes, and the next one for the device that it holds.
        Of a process that has ended, Serve's routers hear at once, and of a dead engine
        fronts hear over the token channel.
        """
        hanging = asyncio.create_task(self._watch.wait_until_hung(self.engine.answer))
        while not (self.engine.is_dead or hanging.done()):
            await asyncio.sleep(_ENGINE_CHECK_S)
        what = f"is silent for {hanging.result():.0f} s" if hanging.done() else "died"
        logger.error(f"The engine {what}; this replica ends, and Serve starts another")
        end_process(logger)

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
            self._options.planner_key, await self.engine.export_planner_state()
        )

    async def watch_board(self, after: Mapping[str, int]) -> dict[str, Any]:
        """Return this replica's newest steps for the board, or an error.

        Fronts hear from all replicas or from none, so one whose engine hangs has to
        answer too.

        Args:
            after: Number of the last step seen, by replica.
        """
        replica = serve.get_replica_context().replica_id.unique_id
        seen: dict[str, Any] = {}
        if self._options.has_snapshots:
            try:
                async with asyncio.timeout(_BOARD_S):
                    seen = await self.engine.watch_board(
                        after.get(replica, 0), with_text=self._options.board_text
                    )
            except TimeoutError:
                seen = {"error": "The engine does not answer."}
        return {"replica": replica, "policy": self._options.policy_name, **seen}
