"""Two tensor-parallel ranks, in processes of their own, decide alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checks import complete, draw_prompts, greedy, summarize_all
from tests.gpu_adapter.interpreted.engines import run_interpreted
from tests.gpu_adapter.interpreted.rank_worker import DECISIONS_FOLDER

ROOT = Path(__file__).parents[3]

PARALLEL: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
}


@pytest.fixture
def decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what ranks decide; their processes get the plugin at start-up."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import tests.gpu_adapter.interpreted.plugin\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(site), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    folder = tmp_path / "decisions"
    folder.mkdir()
    monkeypatch.setenv(DECISIONS_FOLDER, str(folder))
    return folder


def test_ranks_with_other_confidences_admit_the_same_drafts(
    pair: tuple[Path, Path], decisions: Path
) -> None:
    prompts, params = draw_prompts(6), greedy(24)
    with run_interpreted(pair[0]) as plain:
        expected = summarize_all(complete(plain, prompts, params))
    with run_interpreted(
        *pair,
        policy="tetris",
        worker_cls="tests.gpu_adapter.interpreted.rank_worker.RankWorker",
        **PARALLEL,
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
