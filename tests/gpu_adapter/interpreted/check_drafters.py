"""Every drafter of the V2 runner: right tokens, drafts accepted, the budget kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.engine.checks import (
    check_counters,
    complete,
    draw_prompts,
    greedy,
    summarize_all,
)
from tests.engine.tiny_models import (
    write_eagle3_head,
    write_eagle_head,
    write_markov_llama,
    write_mimo,
)
from tests.gpu_adapter.interpreted.engines import run_interpreted
from tests.gpu_adapter.interpreted.parallel_heads import (
    write_dflash_head,
    write_dspark_head,
)

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = draw_prompts(6)
PARAMS = greedy(24)


@dataclass
class Drafter:
    """A target, the head that drafts for it, if it is not a part of the target."""

    target: Path
    head: Path | None


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    llama = write_markov_llama(folder / "target")
    return {
        "eagle": Drafter(llama, write_eagle_head(folder / "eagle")),
        "eagle3": Drafter(llama, write_eagle3_head(folder / "eagle3", llama)),
        "mtp": Drafter(write_mimo(folder / "mimo"), None),
        "dflash": Drafter(llama, write_dflash_head(folder / "dflash", llama)),
        "dspark": Drafter(llama, write_dspark_head(folder / "dspark", llama)),
    }


@pytest.fixture(scope="module")
def expected():
    """What each target answers alone, once it was asked."""
    return {}


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_tokens_are_the_targets_own(method, drafters, expected):
    drafter = drafters[method]
    if drafter.target not in expected:
        with run_interpreted(drafter.target) as plain:
            outputs = complete(plain, PROMPTS, PARAMS)
        expected[drafter.target] = summarize_all(outputs)
    with run_interpreted(
        drafter.target, drafter.head, policy="tetris", method=method
    ) as engine:
        outputs = complete(engine, PROMPTS, PARAMS)
        counters = engine.scheduler.counters

    assert summarize_all(outputs) == expected[drafter.target]
    check_counters(counters)
    assert counters.num_cut_tokens["budget"] > 0
    assert counters.num_accepted_tokens > counters.num_drafts / 2
