"""What is measured: arms and cells, named runs, and what all of it has in common."""

import argparse
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.arms import Arm, parse_arm
from loadtest.bench_command import load_presets
from loadtest.errors import LoadTestError
from serving.settings.number_format import lacks_bfloat16

from .models import find_method, pad, size_kv_cache

PRESETS = load_presets(Path(__file__).with_name("presets.yaml"))

COLD = "cold"
"""The engine of `goodput` held at depth 0: beside `none` it shows what that costs."""

UPSTREAM = "adaptive"
"""vLLM's own adaptive verification, which only a GPU's engine has."""

LOOKUP = "ngram"
"""vLLM's drafts of what followed the same words in the prompt: no draft model."""

_SHORT = ("easy", "hard", "mixed")
_MAX_SHORT_TOKENS, _MAX_LONG_TOKENS = 320, 1200
_MAX_BATCHED_TOKENS = {"cpu": 2048, "gpu": 8192}


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions under which every arm is measured."""

    workload: str
    temperature: float
    concurrency: int

    @property
    def name(self) -> str:
        """Short name, also fit for a file."""
        workload = Path(self.workload).stem
        return f"{workload}-t{self.temperature:g}-c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class Block:
    """Requests that an engine answers in one go, so many in flight at most.

    Attributes:
        prompts: Token ids of each request, in the order in which they come.
        max_tokens: The longest reply.
        switch_at: From this one on prompts are of another kind, if they change.
        due_s: When each comes, s from the first moment on, rising; at once if empty.
        limits: The longest reply of each, where they differ.
        priorities: vLLM's, of each, if they have any.
    """

    prompts: tuple[tuple[int, ...], ...]
    concurrency: int
    temperature: float
    max_tokens: int
    eos_token_id: int
    switch_at: int | None = None
    due_s: tuple[float, ...] = ()
    limits: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run.

    Attributes:
        rounds: Measured rounds, each on engines that start anew.
        window_s: How long each arm is measured at least, in each cell of a round.
        engine: The section `engine` of the deployment whose engines are measured.
        target: Directory of the target, padded or not.
        gpu: Name of the GPU, which one engine at a time holds; None for the CPU's
            engines, which take turns.
    """

    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    rounds: int
    window_s: float
    max_tokens: int
    engine: dict[str, Any]
    target: Path
    draft: Path
    gpu: str | None = None

    def deployment(self, arm: Arm) -> dict[str, Any]:
        """Return the settings with which a server would run an arm's engine."""
        draft = None if arm.policy in ("none", LOOKUP) else self.draft
        return deploy(self.target, draft, _policy_of(arm), self.engine)

    def conditions(self) -> dict[str, Any]:
        """Return what results depend on, but for models, code, requests and machine.

        More rounds and cells may be added later.
        """
        policies = [arm.name for arm in self.arms]
        own = {"policies": policies, "window_s": self.window_s, "gpu": self.gpu}
        return own | {"max_tokens": self.max_tokens} | self.engine


def parse_bench_arm(text: str) -> Arm:
    """Read an arm as a server offers it, or `cold:8`, `adaptive:5` or `ngram:3`."""
    return parse_arm(text, {COLD: 8, UPSTREAM: 5, LOOKUP: 3})


def make_plan(options: argparse.Namespace, gpu: str | None) -> Plan:
    """Return what the command line asks for, on the GPU of that name if any."""
    # What is named twice is measured once.
    arms = tuple(dict.fromkeys(options.policies))
    axes = options.workloads, options.temperatures, options.concurrency
    cells = tuple(dict.fromkeys(itertools.starmap(Cell, itertools.product(*axes))))
    if min(options.temperatures) < 0:
        raise LoadTestError("--temperatures begin at 0")
    absent = UPSTREAM if options.device == "cpu" else COLD
    if any(arm.policy == absent for arm in arms):
        raise LoadTestError(
            f"{absent}: nothing of the kind with --device {options.device}; name other "
            "policies"
        )
    target, draft = pad(options.target, options.target_parameters), options.draft
    reply = options.max_tokens + max(arm.max_depth for arm in arms)
    longest = max(longest_prompt(cell.workload) for cell in cells)
    engine = describe_engine(
        (target, draft),
        num_engines=len(arms),
        length=(options.max_prompt_tokens or longest) + reply,
        most=max(cell.concurrency for cell in cells),
        dtype=options.dtype,
        device=options.device,
    )
    measured = options.rounds, options.window_s, options.max_tokens
    return Plan(arms, cells, *measured, engine, target, draft, gpu)


def describe_engine(
    pair: tuple[Path, Path],
    *,
    num_engines: int,
    length: int,
    most: int,
    dtype: str | None = None,
    device: str = "cpu",
    kv_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the section `engine` of a deployment; fewer cores by taskset.

    Args:
        pair: Target and draft.
        num_engines: That share the memory; on a GPU each has it all.
        length: The longest request in tokens, prompt and reply.
        most: Requests in flight.
        dtype: Of weights and KV cache; None for what a server would take here.
        device: `cpu` or `gpu`.
        kv_tokens: For which each request has room, if that is less than `length`.
    """
    if dtype is None:
        is_slow = device == "cpu" and lacks_bfloat16()
        dtype = "float32" if is_slow else "bfloat16"
    engine: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(most, _MAX_BATCHED_TOKENS[device]),
        # Prompts do not repeat within a round, but they do from round to round.
        "enable_prefix_caching": False,
    }
    if device == "gpu":
        return engine
    room = min(length, kv_tokens or length)
    kv_bytes = size_kv_cache(*pair, dtype, most, room, num_engines)
    cores = len(os.sched_getaffinity(0))
    own = {"enforce_eager": True, "cpu_threads": cores}
    return engine | own | {"kv_cache_memory_bytes": kv_bytes}


def deploy(
    target: Path,
    draft: Path | None,
    policy: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a deployment of these sections, with a draft model if there is one."""
    model = {"id": "bench", "target": str(target.absolute())}
    # What audits do in a few steps is no part of the policy.
    policy = {"audit": 0} | dict(policy)
    if draft is not None:
        model["draft"] = str(draft.absolute())
        policy["method"] = find_method(draft)
    deployment = {"model": model, "policy": policy, "engine": dict(engine)}
    on_gpu = engine["device"] == "gpu"
    return deployment | ({"replicas": {"num_gpus": 1}} if on_gpu else {})


def longest_prompt(workload: str) -> int:
    """Return the most tokens a prompt can have: longer ones are left out."""
    return _MAX_SHORT_TOKENS if workload in _SHORT else _MAX_LONG_TOKENS


def find_gpu() -> str:
    """Return the name of this machine's first GPU; an error if it has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except Exception as error:
        raise LoadTestError(
            f"--device gpu: no NVIDIA GPU is found here ({error}); nvidia-smi must "
            "list one, and the set-up be done with TETRIS_DEVICE=gpu"
        ) from error


def _policy_of(arm: Arm) -> dict[str, Any]:
    if arm.policy == COLD:
        return replace(arm, policy="goodput").settings()
    fixed = replace(arm, policy="fixed").settings()
    if arm.policy == LOOKUP:
        return fixed | {"method": LOOKUP}
    if arm.policy == UPSTREAM:
        return fixed | {"extra": {"enable_adaptive_verification": True}}
    return arm.settings()
