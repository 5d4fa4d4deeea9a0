"""Two tensor-parallel ranks, in processes of their own, decide alike."""

import json
import os
from pathlib import Path

import pytest

from tests.engine.checks import complete, draw_prompts, greedy, summarize_all
from tests.engine.tiny_models import write_eagle_head, write_markov_llama
from tests.gpu_adapter.interpreted.engines import run_interpreted
from tests.gpu_adapter.interpreted.rank_worker import DECISIONS_FOLDER

ROOT = Path(__file__).parents[3]

MULTIPROCESS = {"distributed_executor_backend": "mp"}


@pytest.fixture
def workers_with_plugin(tmp_path, monkeypatch):
    """Let workers' processes get the plugin at their start-up."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import tests.gpu_adapter.interpreted.plugin\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(site), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def decisions(tmp_path, workers_with_plugin, monkeypatch):
    """A folder for what ranks decide."""
    folder = tmp_path / "decisions"
    folder.mkdir()
    monkeypatch.setenv(DECISIONS_FOLDER, str(folder))
    return folder


def test_ranks_with_other_confidences_admit_the_same_drafts(pair, decisions):
    prompts, params = draw_prompts(6), greedy(24)
    with run_interpreted(pair[0]) as plain:
        expected = summarize_all(complete(plain, prompts, params))
    with run_interpreted(
        *pair,
        policy="tetris",
        worker_cls="tests.gpu_adapter.interpreted.rank_worker.RankWorker",
        tensor_parallel_size=2,
        **MULTIPROCESS,
    ) as engine:
        outputs = summarize_all(complete(engine, prompts, params))
        counters = engine.scheduler.counters

    assert outputs == expected
    assert counters.num_accepted_tokens > 0
    first, second = ((decisions / rank).read_text() for rank in ("0", "1"))
    assert first == second
    steps = [json.loads(line) for line in first.splitlines()]
    # Chosen, not the same share of everybody's.
    assert any(
        len(set(admitted)) > 1 and sum(admitted) < sum(offered)
        for _, offered, admitted in steps
    )


@pytest.mark.usefixtures("workers_with_plugin")
def test_pipeline_stages_verify_every_draft(tmp_path):
    """With a head for drafter: a whole model takes itself for the last stage alone.

    That a `draft_model` fails on a second stage is vLLM's own affair, with its own
    scheduler and worker too.
    """
    prompts, params = draw_prompts(6), greedy(24)
    target = write_markov_llama(tmp_path / "target")
    head = write_eagle_head(tmp_path / "eagle")
    with run_interpreted(target) as plain:
        expected = summarize_all(complete(plain, prompts, params))
    with run_interpreted(
        target,
        head,
        policy="tetris",
        method="eagle",
        pipeline_parallel_size=2,
        **MULTIPROCESS,
    ) as engine:
        outputs = summarize_all(complete(engine, prompts, params))
        counters = engine.scheduler.counters

    assert outputs == expected
    assert counters.num_fallbacks["plain_pipeline_parallel"] > 0
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["budget"] == 0
