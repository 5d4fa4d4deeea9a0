"""Every drafter of the V2 runner, and ranks in processes of their own.

Right tokens, drafts accepted, the budget kept; and two tensor-parallel ranks decide
alike.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.engine.checks import draw_prompts, greedy
from tests.engine.tiny_models import write_heads
from tests.gpu_adapter.interpreted.engines import run_interpreted
from tests.gpu_adapter.interpreted.parallel_heads import (
    write_dflash_head,
    write_dspark_head,
)
from tests.gpu_adapter.interpreted.rank_worker import DECISIONS_FOLDER

ROOT = Path(__file__).parents[3]

PROMPTS = draw_prompts(6)
PARAMS = greedy(24)


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


@pytest.fixture(scope="module")
def expect():
    """What a target answers alone."""

    @cache
    def expect_of(target):
        with run_interpreted(target) as plain:
            return plain.answer(PROMPTS, PARAMS)

    return expect_of


def check_tokens(pair, expect, **options):
    """Compare what an engine answers with its target alone; return the counters."""
    expected = expect(pair[0])
    with run_interpreted(*pair, policy="tetris", **options) as engine:
        assert engine.answer(PROMPTS, PARAMS) == expected
        engine.check_counters()
        return engine.counters


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_tokens_are_the_targets_own(method, drafters, expect):
    counters = check_tokens(drafters[method], expect, method=method)
    assert counters.num_cut_tokens["budget"] > 0
    assert counters.num_accepted_tokens > counters.num_drafts / 2


def test_ranks_of_other_confidences_admit_alike(pair, expect, tmp_path, monkeypatch):
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
        expect,
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
