"""Acceptance by position of an exported head, every draft verified."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

from .chats import WorkDir, is_held_out, read_shard
from .export import EVALUATION, write_card
from .generate import start_engine

_NUM_SEQS = 16
_ANSWER_TOKENS = 256


def evaluate(
    target: Path,
    work_dir: WorkDir,
    head: Path,
    draft_tokens: int,
    num_prompts: int,
) -> dict[str, Any]:
    """Let the target answer held-out prompts with the head, and renew its card.

    Returns:
        What is written to the folder's ``evaluation.json``: by temperature and
        position the share accepted of the drafts whose forerunners were.

    Raises:
        ValueError: No chats are held out.
    """
    held_out = [shard for shard in work_dir.shards() if is_held_out(shard)]
    chats = [c for shard in held_out for c in read_shard(work_dir.chats_of(shard))]
    prompts = [
        {"prompt_token_ids": chat.token_ids[: chat.answers[0][0]]}
        for chat in chats[:num_prompts]
    ]
    if not prompts:
        raise ValueError(f"{work_dir.path} holds no chats; run the command generate")
    llm = start_engine(
        target,
        max_num_seqs=_NUM_SEQS,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        # vLLM's own worker puts out other tokens than the target's at temperature 1:
        # ours repairs two of its rejection sampler's CPU kernels.
        scheduler_cls="serving.engine.cpu.scheduler.TetrisScheduler",
        worker_cls="serving.engine.cpu.worker.TetrisCPUWorker",
        additional_config={"tetris": {"policy": "fixed", "draft_tokens": draft_tokens}},
        speculative_config={
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": draft_tokens,
            "num_speculative_tokens_per_batch_size": [[1, _NUM_SEQS, draft_tokens]],
        },
    )
    end = llm.get_tokenizer().eos_token_id
    accepted = {}
    before = _counts(llm)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=_ANSWER_TOKENS,
            stop_token_ids=[end],
            detokenize=False,
        )
        llm.generate(prompts, sampling, use_tqdm=False)
        after = _counts(llm)
        survived = [b - a for a, b in zip(before, after, strict=True)]
        before = after
        accepted[f"temperature_{temperature:.0f}"] = [
            round(one / max(1, earlier), 4)
            for earlier, one in itertools.pairwise(survived)
        ]
    llm.llm_engine.engine_core.shutdown()
    report = {"num_prompts": len(prompts), "accepted": accepted}
    (head / EVALUATION).write_text(json.dumps(report, indent=1) + "\n")
    write_card(head)
    return report


def _counts(llm: LLM) -> list[int]:
    """Return how often was drafted, and accepted at each position."""
    drafts, by_position = 0, []
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            drafts = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            by_position = metric.values
    return [drafts, *by_position]
