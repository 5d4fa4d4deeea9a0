"""What is measured on a GPU, in which parts, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.engine_bench.plan import Cell

SCHEDULER_CLS = "serving.engine.gpu.scheduler.TetrisAsyncScheduler"
WORKER_CLS = "serving.engine.gpu.worker.TetrisGPUWorker"

DEPTH = 6
"""Deepest draft of the arms that choose; also the deepest fixed one."""

MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 2048
MAX_TOKENS = 128
"""Longest reply."""

KV_CACHE_BYTES = 16 << 30
"""Given instead of measured, which takes a start of seconds more and differs by arm:
enough for all requests at their longest, of the widest pair."""

CAPTURE_SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792),
)
"""Tokens for which graphs are captured, for all arms: vLLM's own ceiling lies below
what 256 requests with drafts have, which would then run without a graph. The last is
`MAX_NUM_SEQS` times `DEPTH + 1`."""


@dataclass(frozen=True, slots=True)
class GpuArm:
    """One way to run the engine.

    Attributes:
        name: In tables.
        draft_tokens: Draft length, or the deepest one; 0 without a drafter.
        kind: `none`, `fixed`, `upstream` (vLLM's adaptive verification) or `ours`.
        policy: Of ours.
        is_sampled: Drafts are drawn rather than the likeliest, as a test of the law
            of what is sampled needs them.
    """

    name: str
    draft_tokens: int
    kind: str
    policy: str = "goodput"
    is_sampled: bool = False


ARMS = {
    arm.name: arm
    for arm in (
        GpuArm("goodput", DEPTH, "ours"),
        GpuArm("vllm-adaptive", DEPTH, "upstream"),
        GpuArm("none", 0, "none"),
        GpuArm("fixed-4", 4, "fixed"),
        GpuArm("fixed-2", 2, "fixed"),
        GpuArm("fixed-6", 6, "fixed"),
    )
}
"""In the order of measurement: whatever time is left in the end, ours and its rival
come first."""

LAW_ARM = GpuArm("tetris-sampled", DEPTH, "ours", policy="tetris", is_sampled=True)
"""Verifies a third of what it drafts, whatever that costs, so that there are always
drafts left out to be lossless about."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft of realistic cost: the demo pair, padded.

    Attributes:
        name: In tables and folders.
        target_parameters: Of the padded target; 0 leaves it as it is.
        draft_parameters: Of the padded draft, likewise.
        target_width: Of the padded target's residual stream.
        draft_width: Of the padded draft's.
    """

    name: str
    target_parameters: int
    draft_parameters: int
    target_width: int = 0
    draft_width: int = 0


PAIRS = {
    pair.name: pair
    for pair in (
        Pair("8b", 8_000_000_000, 1_000_000_000, 4096, 2048),
        Pair("1b", 1_000_000_000, 100_000_000, 1024, 512),
        Pair("demo", 0, 0),
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
        cells: Of every arm, most wanted first.
        is_extra: Comes on top, where there is time left for it.
    """

    name: str
    pair: Pair
    arms: tuple[GpuArm, ...]
    limit_s: float
    cells: tuple[Cell, ...] = ()
    is_extra: bool = False


CELLS = (
    Cell("mixed", 0.0, 64),
    Cell("mixed", 0.0, 256),
    Cell("drift-context", 0.0, 64),
    Cell("mixed", 0.0, 16),
    Cell("mixed", 1.0, 64),
    Cell("mixed", 0.0, 1),
)
"""Most wanted first: an arm that runs out of time lacks the last ones. The second half
of `drift-context` is what long contexts cost."""

SMOKE_CELLS = (Cell("mixed", 0.0, 64), Cell("mixed", 1.0, 16))


def _part(
    name: str,
    pair: str,
    arms: tuple[GpuArm, ...],
    limit_s: float,
    cells: tuple[Cell, ...] = CELLS,
    *,
    is_extra: bool = False,
) -> Part:
    return Part(name, PAIRS[pair], arms, limit_s, cells, is_extra)


_SMOKE = (ARMS["goodput"], LAW_ARM, ARMS["none"], ARMS["vllm-adaptive"])
_CHOOSING = tuple(ARMS.values())[:3]
_FIXED = tuple(ARMS.values())[3:]

PARTS = {
    part.name: part
    for part in (
        # Does the adapter run at all, is it lossless, and does it wait for the device
        # anywhere where vLLM's own does not?
        _part("smoke", "demo", _SMOKE, 420.0, SMOKE_CELLS),
        _part("models-8b", "8b", (), 120.0),
        _part("8b", "8b", _CHOOSING, 540.0),
        _part("8b-fixed", "8b", _FIXED, 420.0),
        _part("models-1b", "1b", (), 60.0, is_extra=True),
        _part("1b", "1b", _CHOOSING, 400.0, is_extra=True),
        _part("1b-fixed", "1b", _FIXED, 400.0, is_extra=True),
    )
}
"""In the order in which they are to be run; 25 minutes without the extra ones."""


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
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "compilation_config": {"cudagraph_capture_sizes": list(CAPTURE_SIZES)},
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
    if arm.is_sampled:
        speculative["draft_sample_method"] = "probabilistic"
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
            "additional_config": {"tetris": _policy(arm)},
        }
    return args


def _policy(arm: GpuArm) -> dict[str, Any]:
    if arm.policy == "tetris":
        verified = arm.draft_tokens // 3
        return {
            "policy": "tetris",
            "draft_tokens": verified,
            "max_draft_tokens": arm.draft_tokens,
        }
    length = "draft_tokens" if arm.policy == "fixed" else "max_draft_tokens"
    return {"policy": arm.policy, length: arm.draft_tokens}


def env_of(part: Part) -> dict[str, str]:
    """Return what an engine's process needs beside its usual environment."""
    env = {
        # The scheduler is looked into, so it lives in the process that drives it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if part.name == "smoke":
        # vLLM's own watchdog: it names every wait for the device inside a step, whose
        # fault ever it is.
        env["VLLM_GPU_SYNC_CHECK"] = "warn"
    return env
