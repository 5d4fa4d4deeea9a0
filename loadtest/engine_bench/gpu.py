"""GPU arms: what differs where the engines run on an NVIDIA GPU.

Written without a GPU and not yet run on one. One engine at a time holds it, as two of
a real model seldom fit beside each other: an arm's engine starts, goes through all
cells of a round and ends. No core is pinned, nothing is padded unless asked for,
nothing is traced. `fixed` is what a server runs on a GPU: vLLM's own speculation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .arms import UPSTREAM, Arm
from .errors import BenchError
from .plan import Cell
from .settings import BenchSettings, EngineSettings

SCHEDULER_CLS = "serving.engine.gpu.scheduler.TetrisAsyncScheduler"
WORKER_CLS = "serving.engine.gpu.worker.TetrisGPUWorker"

MAX_BATCHED_TOKENS = 8192

_ONE_DEPTH = frozenset({"tetris"})
"""Policies of ours whose drafts are all of one length."""


class GpuEngineSettings(EngineSettings):
    """What all engines have in common on a GPU, which is what a server gives them."""

    def llm_args(self, arm: Arm) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for an arm."""
        args = self.shared_args(arm)
        if not arm.speculates:
            return args
        speculative: dict[str, Any] = {
            "method": "draft_model",
            "model": str(self.draft),
            "num_speculative_tokens": arm.max_depth,
        }
        args["speculative_config"] = speculative
        if arm.policy == UPSTREAM:
            speculative["enable_adaptive_verification"] = True
        elif arm.policy != "fixed":
            speculative["num_speculative_tokens_per_batch_size"] = self._depths(arm)
            args |= {
                "scheduler_cls": SCHEDULER_CLS,
                "worker_cls": WORKER_CLS,
                "additional_config": {"tetris": self.policy_config(arm)},
            }
        return args

    def _depths(self, arm: Arm) -> list[list[int]]:
        """Return vLLM's table of draft lengths, every length once.

        vLLM captures graphs of the drafter for those in it; our scheduler sets the
        length itself.
        """
        depth = arm.max_depth
        if arm.policy in _ONE_DEPTH:
            return [[1, self.max_num_seqs, depth]]
        first = max(1, depth - self.max_num_seqs + 1)
        shallower = [[n, n, k] for n, k in enumerate(range(first, depth), start=1)]
        return [*shallower, [len(shallower) + 1, self.max_num_seqs, depth]]


def find_gpu() -> str:
    """Return the name of this machine's first GPU.

    Raises:
        BenchError: If there is none, or the vLLM installed here is the one for CPUs.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        raise BenchError(
            "--device gpu: the vLLM installed here is not the one for GPUs; set up "
            "anew with TETRIS_DEVICE=gpu, or leave out --device gpu"
        ) from None
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except Exception as error:
        raise BenchError(
            f"--device gpu: no NVIDIA GPU is found here ({error}); nvidia-smi must "
            "list one, or leave out --device gpu"
        ) from error


def on_gpu(settings: BenchSettings, name: str) -> BenchSettings:
    """Return the same run with its engines on a GPU.

    Args:
        settings: Of the run as it would be on the CPU.
        name: Of the GPU.
    """
    engine = {
        one.name: getattr(settings.engine, one.name) for one in fields(settings.engine)
    }
    engine["max_num_batched_tokens"] = MAX_BATCHED_TOKENS
    return replace(
        settings,
        engine=GpuEngineSettings(**engine),
        gpu=name,
        cpus=(),
        trace=False,
        rounds_per_start=settings.rounds_per_start or 1,
    )


def check_device(
    options: argparse.Namespace, arms: Sequence[Arm], cells: Sequence[Cell]
) -> None:
    """Refuse what the device asked for does not have.

    Args:
        options: The command line's.
        arms: To be measured.
        cells: To be measured.

    Raises:
        BenchError: With the options at fault.
    """
    if options.device == "cpu":
        if any(arm.policy == UPSTREAM for arm in arms):
            raise BenchError(
                f"--policies {UPSTREAM} is vLLM's own verification, which it has on "
                "GPUs alone; leave it out, or add --device gpu"
            )
        return
    wanted = {
        "--cpus": options.cpus is not None,
        "--trace": bool(options.trace),
        "--policies cold or warm": any(arm.held_at_zero for arm in arms),
        "--workloads drift-neighbour": any(
            cell.workload == "drift-neighbour" for cell in cells
        ),
    }
    if any(wanted.values()):
        found = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
        raise BenchError(
            f"{found}: nothing of the kind with --device gpu; leave that out, name "
            "other policies or workloads, or leave out --device gpu"
        )
