"""What is measured on a GPU, in which parts, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.engine_bench.plan import Cell

SCHEDULER_CLS = "serving.engine.scheduler_v2.TetrisAsyncScheduler"
WORKER_CLS = "serving.engine.worker_gpu.TetrisGPUWorker"

DEPTH = 6
"""Deepest draft of the arms that choose; also the deepest fixed one."""

MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 2048
MAX_TOKENS = 128
"""Longest reply."""


@dataclass(frozen=True, slots=True)
class GpuArm:
    """One way to run the engine.

    Attributes:
        name: In tables.
        draft_tokens: Draft length, or the deepest one; 0 without a drafter.
        kind: `none`, `fixed`, `upstream` (vLLM's adaptive verification) or `ours`.
    """

    name: str
    draft_tokens: int
    kind: str


ARMS = {
    arm.name: arm
    for arm in (
        GpuArm("none", 0, "none"),
        GpuArm("fixed-2", 2, "fixed"),
        GpuArm("fixed-4", 4, "fixed"),
        GpuArm("fixed-6", 6, "fixed"),
        GpuArm("vllm-adaptive", DEPTH, "upstream"),
        GpuArm("goodput", DEPTH, "ours"),
    )
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft of realistic cost: the demo pair, padded.

    Attributes:
        name: In tables and folders.
        target_parameters: Of the padded target; 0 leaves it as it is.
        draft_parameters: Of the padded draft, likewise.
    """

    name: str
    target_parameters: int
    draft_parameters: int


PAIRS = {
    pair.name: pair
    for pair in (
        Pair("demo", 0, 0),
        Pair("1b", 1_000_000_000, 100_000_000),
        Pair("8b", 8_000_000_000, 1_000_000_000),
    )
}


@dataclass(frozen=True, slots=True)
class Part:
    """What one command does.

    Attributes:
        name: To ask for it.
        pair: The models.
        arms: In the order of measurement; none only makes the models.
        limit_s: Longest time it takes, engine starts included.
    """

    name: str
    pair: Pair
    arms: tuple[GpuArm, ...]
    limit_s: float


def _part(name: str, pair: str, arms: tuple[str, ...], limit_s: float) -> Part:
    return Part(name, PAIRS[pair], tuple(ARMS[arm] for arm in arms), limit_s)


PARTS = {
    part.name: part
    for part in (
        # Does the adapter run at all, and does it wait for the device anywhere where
        # vLLM's own does not?
        _part("smoke", "demo", ("goodput", "vllm-adaptive", "none"), 180.0),
        _part("models-1b", "1b", (), 60.0),
        _part("1b", "1b", tuple(ARMS), 420.0),
        _part("models-8b", "8b", (), 210.0),
        _part("8b-choosing", "8b", ("none", "goodput", "vllm-adaptive"), 360.0),
        _part("8b-fixed", "8b", ("fixed-2", "fixed-4", "fixed-6"), 270.0),
    )
}
"""In the order in which they are to be run; 25 minutes in all."""

CELLS = (
    Cell("mixed", 0.0, 64),
    Cell("mixed", 0.0, 256),
    Cell("drift-context", 0.0, 64),
    Cell("mixed", 0.0, 16),
    Cell("mixed", 0.0, 1),
    Cell("mixed", 0.0, 128),
    Cell("mixed", 1.0, 64),
    Cell("mixed", 1.0, 256),
    Cell("drift-context", 1.0, 64),
    Cell("mixed", 1.0, 16),
    Cell("mixed", 1.0, 1),
    Cell("mixed", 1.0, 128),
)
"""Most wanted first: an arm that runs out of time lacks the last ones. The second half
of `drift-context` is what long contexts cost."""

SMOKE_CELLS = (Cell("mixed", 0.0, 16), Cell("mixed", 1.0, 64))


def cells_of(part: Part) -> tuple[Cell, ...]:
    """Return the cells of a part, most wanted first."""
    return SMOKE_CELLS if part.name == "smoke" else CELLS


def depth_table(depth: int) -> list[list[int]]:
    """Return vLLM's table of draft lengths, every length once.

    vLLM captures graphs of the drafter for the lengths in it; our scheduler sets the
    length itself.
    """
    shallower = [[length, length, length] for length in range(1, depth)]
    return [*shallower, [depth, MAX_NUM_SEQS, depth]]


def llm_args(arm: GpuArm, target: Path, draft: Path) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an arm."""
    args: dict[str, Any] = {
        "model": str(target),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    if arm.kind == "none":
        return args
    speculative: dict[str, Any] = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": arm.draft_tokens,
    }
    if arm.kind == "upstream":
        speculative["enable_adaptive_verification"] = True
    args["speculative_config"] = speculative
    if arm.kind == "ours":
        speculative["num_speculative_tokens_per_batch_size"] = depth_table(
            arm.draft_tokens
        )
        args |= {
            "scheduler_cls": SCHEDULER_CLS,
            "worker_cls": WORKER_CLS,
            "additional_config": {
                "tetris": {"policy": "goodput", "draft_tokens": arm.draft_tokens}
            },
        }
    return args


def env_of(part: Part) -> dict[str, str]:
    """Return what an engine's process needs beside its usual environment."""
    env = {
        # The scheduler is looked into, so it lives in the process that drives it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if part.name == "smoke":
        # vLLM's own watchdog: any wait for the device inside a step is an error.
        env["VLLM_GPU_SYNC_CHECK"] = "error"
    return env
