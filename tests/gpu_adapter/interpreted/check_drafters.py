"""Every drafter of the V2 runner, and ranks in processes of their own.

Right tokens, drafts accepted, the budget kept; and two tensor-parallel ranks decide
alike.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.checks import draw_prompts, greedy
from tests.engine.law.models import load_reference
from tests.engine.tiny_models import write_heads
from tests.gpu_adapter.interpreted.engines import run_interpreted
from tests.gpu_adapter.interpreted.parallel_heads import (
    write_dflash_head,
    write_dspark_head,
)
from tests.gpu_adapter.interpreted.rank_worker import DECISIONS_FOLDER

ROOT = Path(__file__).parents[3]

PROMPTS = draw_prompts(5)
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Targets, and the heads that draft for them if they are not a part of them."""
    folder = tmp_path_factory.mktemp("heads")
    heads = write_heads(folder)
    llama, _ = heads["eagle"]
    return heads | {
        "dflash": (llama, write_dflash_head(folder / "dflash", llama)),
        "dspark": (llama, write_dspark_head(folder / "dspark", llama)),
    }


@cache
@torch.no_grad()
def find_answers(target):
    """Return each prompt's most likely tokens, one after the other, in float64."""
    model, answers = load_reference(target), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def check_tokens(pair, **options):
    """Compare what an engine answers with its target alone; return the counters."""
    with run_interpreted(*pair, policy="tetris", **options) as engine:
        answers = engine.answer(PROMPTS, greedy(NUM_TOKENS))
        assert [tokens for [(tokens, *_)] in answers] == find_answers(pair[0])
        engine.check_counters()
        return engine.counters


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_tokens_are_the_targets_own(method, drafters):
    counters = check_tokens(drafters[method], method=method)
    assert counters.num_cut_tokens["budget"] > 0
    assert counters.num_accepted_tokens > counters.num_drafts / 3


def test_ranks_of_other_confidences_admit_alike(pair, tmp_path, monkeypatch):
    # Workers in processes of their own get the plugin at their start-up.
    site = tmp_path / "site"
    site.mkdir()
    module = site / "sitecustomize.py"
    module.write_text("import tests.gpu_adapter.interpreted.plugin\n")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(site), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(DECISIONS_FOLDER, str(tmp_path))
    counters = check_tokens(
        pair,
        worker_cls="tests.gpu_adapter.interpreted.rank_worker.RankWorker",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert counters.num_accepted_tokens > 0
    first, second = ((tmp_path / rank).read_text() for rank in ("0", "1"))
    assert first == second
    steps = [json.loads(line) for line in first.splitlines()]
    # Chosen, not the same share of everybody's.
    assert any(
        len(set(admitted)) > 1 and sum(admitted) < sum(offered)
        for _, offered, admitted in steps
    )


def test_drafts_are_accepted_by_chance_as_often_as_asked_for(pair):
    """Whatever the models are: what `bench paper --acceptance` has vLLM do on GPUs."""
    chances = {"rejection_sample_method": "synthetic"}
    chances["synthetic_acceptance_rates"] = [1.0, 0.5, 0.0]
    options = {"policy": "fixed", "draft_tokens": 3, "speculative": chances}
    with run_interpreted(*pair, **options) as engine:
        engine.answer(PROMPTS, greedy(48))
        counters = engine.counters
    shares = [n / counters.num_drafts for n in counters.num_accepted_tokens_per_pos]
    assert counters.num_drafts > 50
    assert shares == [1.0, pytest.approx(0.5, abs=0.15), 0.0]
