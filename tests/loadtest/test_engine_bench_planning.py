"""A cell for the time of planning, with more requests than all policies can afford."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.engine_bench import cli
from loadtest.engine_bench.arms import parse_arm
from loadtest.engine_bench.cli import make_parser
from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.estimates import PLANNING_AT_REQUESTS
from loadtest.engine_bench.plan import PLANNING, Cell, is_sweep
from loadtest.engine_bench.run import Bench
from loadtest.engine_bench.settings import BenchSettings
from loadtest.engine_bench.store import Store
from loadtest.engine_bench.workloads import MAX_SHORT_TOKENS, RequestMaker
from tests.loadtest.test_engine_bench import words_as_tokens
from tests.loadtest.test_engine_bench_pieces import ARMS, LENDER, MODELS, SWEEP
from tests.loadtest.test_engine_bench_pieces import make_settings as make_small

CELL = Cell(PLANNING, 0.0, PLANNING_AT_REQUESTS)
GOODPUT = parse_arm("goodput:8")


@pytest.fixture(autouse=True)
def _no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "pad", lambda source, parameters, cache: source)
    monkeypatch.setattr(
        cli,
        "kv_cache_bytes",
        lambda target, draft, dtype, num_tokens, num_requests: num_tokens,
    )


def make_settings(*arguments: str) -> BenchSettings:
    options = make_parser().parse_args(["--output", "nowhere", *arguments])
    preset = cli.choose_preset(options)
    requests = RequestMaker(
        words_as_tokens, 2, 0, preset.min_requests, preset.requests_per_slot
    )
    return cli._make_settings(options, preset, requests)


def test_the_full_run_times_the_planning_of_64_requests_on_goodput_alone() -> None:
    settings = make_settings("--preset", "full")

    assert settings.arms_in(CELL) == (GOODPUT,)
    assert [cell for cell in settings.cells if cell.concurrency >= 64] == [CELL]
    # It does not take part in the sweep: no other policy is measured there.
    assert not is_sweep(CELL)
    # Every request has its place, and its room in the cache.
    assert settings.engine.max_num_seqs == 64
    longest = MAX_SHORT_TOKENS + settings.max_tokens + 8
    assert settings.engine.kv_cache_of(GOODPUT) == 64 * longest
    assert settings.engine.kv_cache_of(parse_arm("fixed:2")) == 32 * longest


def test_it_is_there_only_with_the_presets_own_loads_and_with_goodput() -> None:
    for arguments in (["--workloads", "mixed"], ["--concurrency", "1,2"]):
        assert CELL not in make_settings(*arguments).cells
    few = make_settings("--policies", "none,fixed:2")
    assert CELL not in few.cells
    assert few.engine.max_num_seqs == 32
    with pytest.raises(BenchError, match="name it with --policies"):
        make_settings("--workloads", PLANNING, "--policies", "none")


def test_nobody_else_warms_up_for_it_and_nothing_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.engine_bench.run.describe_models", lambda _: MODELS)
    settings = make_small(cells=(SWEEP, CELL))
    requests: Any = RequestMaker(words_as_tokens, 2, 0, 6, 3)
    bench = Bench(settings, Store(tmp_path), requests)

    assert [cell for cell, _ in bench._missing_traces()] == [SWEEP]
    loads = {arm: bench._loads_of(arm) for arm in (*ARMS, LENDER)}
    assert loads.pop(GOODPUT) == [4, 64]
    assert set(map(tuple, loads.values())) == {(4,)}
