"""Engines of the interpreted runner."""

from contextlib import contextmanager

from tests.engine.conftest import run_engine
from tests.gpu_adapter.interpreted.plugin import OUR_SCHEDULER

OUR_WORKER = "tests.gpu_adapter.interpreted.worker.InterpretedWorker"

MAX_NUM_SEQS = 8


@contextmanager
def run_interpreted(target, draft=None, *, policy="none", **options):
    """Start an engine as `run_engine` does, on the V2 runner.

    With a policy it has our asynchronous scheduler and our runner, without one vLLM's.
    """
    args = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
    }
    if policy != "none":
        args |= {"scheduler_cls": OUR_SCHEDULER, "worker_cls": OUR_WORKER}
    with run_engine(target, draft, policy=policy, **(args | options)) as engine:
        yield engine
