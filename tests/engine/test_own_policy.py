"""A policy of a package that is not ours decides in a real engine."""

import pytest

from tests.engine.checks import complete, draw_prompts, greedy
from tests.engine.conftest import run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CODE = """
import numpy as np
from policies.planner import (Planner)
from policies.types import DraftSelection


class EveryOther(Planner):
    def __init__(self, max_depth, limits, num_kept):
        self.max_depth, self.num_kept = max_depth, num_kept

    def select(self, batch):
        admitted = np.minimum(batch.num_draft_tokens, self.num_kept)
        admitted[::2] = 0
        return DraftSelection(admitted, int(admitted.sum()))

    def choose_depth(self, num_reqs, latency_target_ms=None):
        return self.max_depth

    def observe(self, outcome):
        pass
"""


def test_a_planner_of_somebody_elses_package_is_built_and_obeyed(
    tiny_pair, tmp_path, monkeypatch
):
    (tmp_path / "others_policy.py").write_text(CODE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    additional = {
        "policy": "others_policy:EveryOther",
        "max_draft_tokens": 3,
        "params": {"num_kept": 2},
    }
    with run_engine(
        *tiny_pair,
        policy="others_policy:EveryOther",
        draft_tokens=3,
        additional_config={"tetris": additional},
    ) as engine:
        complete(engine, draw_prompts(4), greedy(16))
        counters = engine.scheduler.counters
        assert counters.policy == "others_policy:EveryOther"
        assert counters.num_fallbacks == {}
        assert counters.num_verified_tokens > 0
        # Of at most four requests two verify two of three drafts each.
        assert counters.num_verified_tokens <= counters.num_proposed_tokens / 3
