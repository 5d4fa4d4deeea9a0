"""The conditions of a run: what must not change between its pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arms import Arm, lend_drafts
from .plan import Cell, is_planning, is_sweep

SCHEDULER_CLS = "serving.engine.cpu.scheduler.TetrisScheduler"
WORKER_CLS = "serving.engine.cpu.worker.TetrisCPUWorker"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What all engines have in common.

    Attributes:
        target: Directory of the target, padded or not.
        draft: Directory of the draft.
        dtype: Of weights and KV cache.
        max_model_len: Longest context.
        max_num_seqs: Largest concurrency of any cell.
        max_num_batched_tokens: Most tokens in a step.
        kv_cache_memory_bytes: Size of the KV cache.
        planning_kv_cache_memory_bytes: The same where planning is timed, on `goodput`
            alone: that many requests at a time have no other engine. 0 where it is not.
    """

    target: Path
    draft: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    planning_kv_cache_memory_bytes: int = 0

    def kv_cache_of(self, arm: Arm) -> int:
        """Return the size of an arm's KV cache in bytes."""
        own = self.planning_kv_cache_memory_bytes if arm.policy == "goodput" else 0
        return max(own, self.kv_cache_memory_bytes)

    def shared_args(self, arm: Arm) -> dict[str, Any]:
        """Return those of the arguments that no device changes."""
        return {
            "model": str(self.target),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_of(arm),
            "skip_tokenizer_init": True,
            # Prompts do not repeat within a round, but they do from round to round.
            "enable_prefix_caching": False,
        }

    @staticmethod
    def policy_config(arm: Arm) -> dict[str, Any]:
        """Return an arm's policy as it travels inside vLLM's configuration."""
        config = {"policy": arm.engine_policy, "max_draft_tokens": arm.max_depth}
        if arm.engine_policy in {"fixed", "tetris"}:
            config["draft_tokens"] = arm.draft_tokens
        return config

    def llm_args(self, arm: Arm) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for an arm."""
        args = self.shared_args(arm) | {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
        }
        if not arm.speculates:
            return args
        depth = arm.max_depth
        return args | {
            "scheduler_cls": SCHEDULER_CLS,
            "worker_cls": WORKER_CLS,
            "additional_config": {"tetris": self.policy_config(arm)},
            "speculative_config": {
                "method": "draft_model",
                "model": str(self.draft),
                "num_speculative_tokens": depth,
                "num_speculative_tokens_per_batch_size": [
                    [1, self.max_num_seqs, depth]
                ],
            },
        }


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """A whole run.

    Attributes:
        arms: In the order of the tables.
        cells: In the order of measurement.
        rounds: Measured rounds.
        engine: What all engines have in common.
        cpus: Cores the engines are bound to; none on a GPU.
        max_tokens: Longest reply.
        seed: Of the requests.
        min_requests: Fewest requests of a cell; in drifting cells after the change.
        requests_per_slot: Requests of a cell for each one in flight; in drifting cells
            before the change of conditions.
        drift_requests_per_slot: The same after the change.
        trace: Whether a traced round follows.
        rounds_per_start: Rounds that are measured before all engines start anew; None
            for all. Two engines of one kind differ by up to 2 % from start to start,
            which more rounds on the same engines do not average out.
        sweep_arms: Arms that take part in the sweep over loads alone.
        gpu: Name of the GPU, which one engine at a time holds; None for the CPU's
            engines, which take turns.
    """

    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    rounds: int
    engine: EngineSettings
    cpus: tuple[int, ...]
    max_tokens: int
    seed: int
    min_requests: int
    requests_per_slot: int
    drift_requests_per_slot: int
    trace: bool
    rounds_per_start: int | None = None
    sweep_arms: frozenset[Arm] = frozenset()
    gpu: str | None = None

    def arms_in(self, cell: Cell) -> tuple[Arm, ...]:
        """Return the arms that are measured in a cell."""
        if is_planning(cell):
            return tuple(arm for arm in self.arms if arm.policy == "goodput")
        if is_sweep(cell):
            return self.arms
        return tuple(arm for arm in self.arms if arm not in self.sweep_arms)

    def lending_arms(self) -> tuple[Arm, ...]:
        """Return arms that are traced and not measured."""
        return lend_drafts(self.arms) if self.trace else ()

    def conditions(self) -> dict[str, Any]:
        """Return what results depend on, but for models, code and machine.

        Rounds, cells and tracing are left out: more of them may be added later.
        """
        return {
            "policies": [arm.name for arm in self.arms],
            "policies of the sweep alone": sorted(arm.name for arm in self.sweep_arms),
            "dtype": self.engine.dtype,
            "max_model_len": self.engine.max_model_len,
            "max_num_seqs": self.engine.max_num_seqs,
            "max_num_batched_tokens": self.engine.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.engine.kv_cache_memory_bytes,
            "planning_kv_cache_memory_bytes": (
                self.engine.planning_kv_cache_memory_bytes
            ),
            "cpus": list(self.cpus),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "min_requests": self.min_requests,
            "requests_per_slot": self.requests_per_slot,
            "drift_requests_per_slot": self.drift_requests_per_slot,
            "rounds_per_start": self.rounds_per_start,
        } | ({} if self.gpu is None else {"gpu": self.gpu})
