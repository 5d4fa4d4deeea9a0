"""Engines of the interpreted runner."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.engine.conftest import Engine, run_engine
from tests.gpu_adapter.interpreted.plugin import OUR_SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUR_WORKER = "tests.gpu_adapter.interpreted.worker.InterpretedWorker"

MAX_NUM_SEQS = 8


@contextmanager
def run_interpreted(
    target: Path, draft: Path | None = None, *, policy: str = "none", **options: Any
) -> Iterator[Engine]:
    """Start an engine as `run_engine` does, on the V2 runner.

    With a policy it has our asynchronous scheduler and our runner, without one vLLM's.
    """
    args: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
    }
    if policy != "none":
        args |= {"scheduler_cls": OUR_SCHEDULER, "worker_cls": OUR_WORKER}
    with run_engine(target, draft, policy=policy, **(args | options)) as engine:
        yield engine
