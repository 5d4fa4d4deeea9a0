"""Real vLLM engines inside the test process, so that a test can look into them."""

import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Tiny models gain nothing from a second thread, and vLLM's, bound to cores that other
# processes use too, wait for each other a hundred times longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# As in a replica that runs eagerly, which all of these do.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import pytest

from tests.conftest import OTHERS_MAY_WARN
from tests.engine import checks, made_up
from tests.engine.tiny_models import write_llama_pair, write_tokenizer

MAX_NUM_SEQS = 16

BLOCK = 32
"""The smallest KV block of vLLM's CPU attention; the default, 128, is longer than what
most tests share."""

OWN_DEPTH = 5
"""To which `own_draft` may draft."""

THIRD_PARTY_MAY_WARN = OTHERS_MAY_WARN
"""For tests that start engines elsewhere."""


@dataclass
class Engine:
    """An engine and its inner parts."""

    llm: Any
    _started_with: tuple[int, int] | None = None

    complete, answer, drive = checks.complete, checks.answer, checks.drive
    watch, draft_at = checks.watch, made_up.draft_at
    check_counters, check_idle = checks.check_counters, checks.check_idle

    @property
    def core(self):
        """The engine core of this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        """The scheduler, ours unless the policy is `none`."""
        return self.core.scheduler

    @property
    def counters(self):
        """What was counted of speculation since the latest policy was set."""
        return self.scheduler.counters

    @property
    def runner(self):
        """The model runner of the only worker."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def set_policy(
        self, policy, *, max_num_seqs=0, max_num_batched_tokens=0, **section
    ):
        """Give the scheduler a new planner and counters, as if just started.

        At most as deep as the engine was started; with fewer requests and tokens in a
        step, for a while, where that is not 0.
        """
        scheduler = self.scheduler
        settings = scheduler.vllm_config.additional_config["tetris"]
        settings |= {"policy": policy, **section}
        scheduler._batch.limits.lift()
        self._started_with = self._started_with or (
            scheduler.max_num_active_reqs,
            scheduler.max_num_scheduled_tokens,
        )
        num_seqs, num_tokens = self._started_with
        scheduler.max_num_active_reqs = max_num_seqs or num_seqs
        scheduler.max_num_scheduled_tokens = max_num_batched_tokens or num_tokens
        # Where costs were made up.
        vars(scheduler).pop("_learn_timing", None)
        scheduler._set_up()

    def start_over(self, policy, **section):
        """Forget what is cached, and take a policy as if just started with it."""
        self.llm.reset_prefix_cache()
        self.set_policy(policy, **section)
        return self

    @contextmanager
    def hold_blocks(self, num_left):
        """Leave so few KV blocks that requests lose theirs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - num_left)
        try:
            yield
        finally:
            pool.free_blocks(held)


_RUNNING = []


@contextmanager
def run_engine(
    target,
    draft=None,
    *,
    policy="none",
    draft_tokens=2,
    extra_draft_tokens=2,
    method="draft_model",
    speculative=None,
    classes=None,
    **engine_args,
):
    """Start an engine for a policy and stop it afterwards.

    `draft_tokens` is k, and for policies that choose, the depth they choose within;
    `tetris` drafts by `extra_draft_tokens` deeper. `speculative` holds more keys of
    vLLM's `speculative_config`; `engine_args` override the defaults below.
    """
    from vllm import LLM

    from serving import plugin

    args = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 512,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        **engine_args,
    }
    if policy != "none":
        depth = draft_tokens + (extra_draft_tokens if policy == "tetris" else 0)
        config = {
            "method": method,
            "num_speculative_tokens": depth,
            "num_speculative_tokens_per_batch_size": [[1, args["max_num_seqs"], depth]],
            **(speculative or {}),
        }
        if draft is not None:
            config["model"] = str(draft)
        section = {"policy": policy, "classes": classes or {}}
        section |= {"draft_tokens": draft_tokens, "max_draft_tokens": depth}
        args = {
            "scheduler_cls": "serving.engine.cpu.scheduler.TetrisScheduler",
            "worker_cls": "serving.engine.cpu.worker.TetrisCPUWorker",
            "additional_config": {"tetris": section},
            "speculative_config": config,
            **args,
        }
    # Else none could start where the n-gram drafter has compiled.
    plugin.register()
    engine = Engine(LLM(str(target), **args))
    _RUNNING.append(engine)
    try:
        yield engine
    finally:
        _RUNNING.remove(engine)
        # vLLM ends with an engine what all of a process share.
        end_shared = "vllm.v1.engine.core.cleanup_dist_env_and_memory"
        with patch(end_shared) if _RUNNING else nullcontext():
            engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """A random target, whose tokens are characters, and a draft that often agrees."""
    pair = write_llama_pair(tmp_path_factory.mktemp("tiny_pair"), noise=0.05)
    write_tokenizer(pair[0])
    return pair


@pytest.fixture(scope="session")
def plain(tiny_pair):
    """The target of `tiny_pair` alone, for what others have to answer.

    Ask for it before starting another: each start registers vLLM's own CPU kernels,
    and ours repair them.
    """
    with run_engine(tiny_pair[0], skip_tokenizer_init=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def own_draft(tiny_pair, plain):
    """The target drafts `OWN_DEPTH` tokens for itself, so that all drafts are right.

    One that is rejected means a hole in the drafter's cache.
    """
    with run_engine(
        tiny_pair[0],
        tiny_pair[0],
        policy="fixed",
        draft_tokens=OWN_DEPTH,
        block_size=BLOCK,
        max_num_batched_tokens=256,  # Some catch-ups take several passes.
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def _speculating(tiny_pair, plain):
    with run_engine(
        *tiny_pair,
        policy="tetris",
        skip_tokenizer_init=False,
        block_size=BLOCK,
        scheduling_policy="priority",
        per_request_spec_decode_metrics="detailed",
    ) as engine:
        yield engine


@pytest.fixture
def tetris(_speculating):
    """An engine that drafts four tokens a request and verifies two, as if new."""
    own = {"draft_tokens": 2, "max_draft_tokens": 4, "classes": {}, "params": {}}
    return _speculating.start_over("tetris", **own)


@pytest.fixture
def no_host_time(monkeypatch):
    """Let steps take what their stand-in worker says, however busy the machine is."""
    from serving.engine.cpu.step_clock import StepClock

    finish = StepClock.finish

    def finish_on_time(*args):
        timing = finish(*args)
        return timing and replace(timing, host_ms=0.0)

    monkeypatch.setattr(StepClock, "finish", finish_on_time)
