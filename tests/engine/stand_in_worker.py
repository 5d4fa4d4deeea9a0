"""Real schedulers without engines, and a CPU worker that invents tokens and times."""

import numpy as np

from policies.types import CostProfile
from serving.engine.compat import ModelRunnerOutput
from serving.engine.cpu.drafts import ScoredDraftTokenIds, WorkerTimes
from serving.engine.cpu.step_messages import STOP_ATTRIBUTE

BLOCK_SIZE, NUM_BLOCKS = 16, 4000


def make_config(target, draft, tetris, *, depth, **args):
    """Build vLLM's own configuration of an engine that has no worker.

    Of the model folders only the configurations are read; `args` are of `EngineArgs`,
    `max_num_seqs` among them.
    """
    from vllm import EngineArgs

    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=256,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        additional_config={"tetris": tetris},
        speculative_config={
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": depth,
            "num_speculative_tokens_per_batch_size": [[1, args["max_num_seqs"], depth]],
        },
        **args,
    ).create_engine_config()


def make_scheduler(cls, config, num_blocks=NUM_BLOCKS):
    """Build a real scheduler with a KV cache of its own."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    structured = StructuredOutputManager(config)
    return cls(config, kv_cache, structured, block_size=BLOCK_SIZE)


def make_cpu_scheduler(pair, *, num_reqs, depth, max_tokens=1024, **section):
    """Build our scheduler of the CPU for so many requests and a policy's section."""
    from serving.engine.cpu.scheduler import TetrisScheduler

    section = {"draft_tokens": depth, "max_draft_tokens": depth} | section
    sizes = {"max_num_seqs": num_reqs, "max_num_batched_tokens": max_tokens}
    config = make_config(*pair, section, depth=depth, enforce_eager=True, **sizes)
    return make_scheduler(TetrisScheduler, config)


def add_requests(
    scheduler,
    num_reqs,
    *,
    prompt_len=5,
    max_tokens=40,
    prefix="r",
    **params,
):
    """Add requests that run to their length limit."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    requests = []
    for index in range(num_reqs):
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **params
        )
        sampling.update_from_generation_config({}, eos_token_id=2)
        prompt = list(range(10, 10 + prompt_len))
        name = f"{prefix}{index}"
        requests.append(Request(name, prompt, sampling, None))
        scheduler.add_request(requests[-1])
    return requests


class StandInWorker:
    """Drafts, verifies and takes time as a worker of a small model would.

    Attributes:
        is_broken: Of which requests, by id, no draft is accepted, however sure the
            drafter is.
        now_s: A clock that only its steps move, for tests that no machine may sway.
    """

    def __init__(self):
        self.now_s = 0.0
        self.is_broken = lambda req_id: False
        self._rng = np.random.default_rng(0)
        counts = (1, 8, 64, 512)
        target_ms = tuple(20.0 + 0.1 * count for count in counts)
        self._profile = CostProfile(counts, target_ms, (1.0,) * len(counts))

    def step(self, scheduler):
        """Let a scheduler take a step; return what it scheduled."""
        output = scheduler.schedule()
        sampled, drafts = self.execute(output)
        scheduler.update_from_output(output, sampled)
        if sampled.req_ids:
            scheduler.update_draft_token_ids(drafts)
        return output

    def execute(self, output):
        """Run a step in which every request decodes, or has its whole prompt."""
        req_ids = list(output.num_scheduled_tokens)
        scheduled = output.scheduled_spec_decode_tokens
        sampled = [self._sample(r, len(scheduled.get(r, ()))) for r in req_ids]
        depth = output.num_spec_tokens_to_schedule
        confidence = self._rng.beta(4.0, 1.5, (len(req_ids), depth))
        stop = getattr(output, STOP_ATTRIBUTE, None)
        if stop is not None:
            watch, depth = stop.start(tuple(req_ids)), 1
            while watch.should_continue(confidence[:, depth - 1].tolist()):
                depth += 1
            confidence = np.ascontiguousarray(confidence[:, :depth])
        target_ms = 20.0 + 0.1 * output.total_num_scheduled_tokens
        first_ms, next_ms = float(depth > 0), float(max(0, depth - 1))
        self.now_s += 1e-3 * (target_ms + first_ms + next_ms + 2.0)
        profile, self._profile = self._profile, None
        drafts = ScoredDraftTokenIds(
            req_ids,
            [[7] * depth for _ in req_ids],
            confidence=confidence,
            times=WorkerTimes(target_ms, 1.0, first_ms, next_ms, depth),
            profile=profile,
        )
        rows = {req_id: row for row, req_id in enumerate(req_ids)}
        return ModelRunnerOutput(req_ids, rows, sampled), drafts

    def _sample(self, req_id, num_drafts):
        rejected = np.flatnonzero(self._rng.random(num_drafts) > 0.7)
        num_accepted = int(rejected[0]) if rejected.size else num_drafts
        return [7] * (1 if self.is_broken(req_id) else num_accepted + 1)
