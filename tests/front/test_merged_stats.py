"""Figures of many steps as those of one: nothing is lost, and no level stays wrong."""

import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import (
    IterationStats,
    MultiModalCacheStats,
    PrefixCacheStats,
    SchedulerStats,
)
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from serving.replica.merged_stats import INTERVAL_S, MergedStats, merge_stats


class Inner:
    """Adds up what vLLM's logger reads of each record."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.sums: Counter[str] = Counter()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self.records.append(
            (scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        )
        if scheduler_stats is None:
            return
        prefix = scheduler_stats.prefix_cache_stats
        for name in ("requests", "queries", "hits"):
            self.sums[name] += getattr(prefix, name)
        drafts = scheduler_stats.spec_decoding_stats
        if drafts is not None:
            self.sums["drafts"] += drafts.num_drafts
            self.sums["accepted"] += drafts.num_accepted_tokens
            for pos, count in enumerate(drafts.num_accepted_tokens_per_pos):
                self.sums[f"accepted {pos}"] += count

    def log(self) -> None:
        pass


def step(
    num_running: int,
    queries: int = 0,
    accepted: int | None = None,
    prefix: Any = None,
    **levels: Any,
) -> Any:
    made = SchedulerStats(num_running_reqs=num_running, **levels)
    made.prefix_cache_stats = PrefixCacheStats(
        requests=1, queries=queries, hits=queries // 2, **prefix or {}
    )
    if accepted is not None:
        made.spec_decoding_stats = SpecDecodingStats.new(2)
        made.spec_decoding_stats.observe_draft(2, accepted)
    return made


STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 2 * INTERVAL_S),
        st.integers(0, 3),
        st.integers(0, 50),
        st.sampled_from([None, 0, 1, 2]),
        st.sampled_from([{}, {}, {}, {"kv_connector_stats": {"moved": 1}}]),
    ),
    max_size=30,
)


@given(STEPS)
def test_sums_are_those_of_all_steps_and_levels_those_of_the_last(steps):
    now_s, inner, plain = 0.0, Inner(), Inner()
    merged = MergedStats(inner, clock=lambda: now_s)
    for wait_s, num_running, queries, accepted, more in steps:
        now_s += wait_s
        made = step(num_running, queries, accepted, **more)
        before = copy.deepcopy(made)
        plain.record(made, None)
        merged.record(made, None)
        assert made == before, "others were handed it too"
        if num_running == 0 or more:
            assert inner.sums == plain.sums
            assert inner.records[-1][0].num_running_reqs == num_running
    merged.log()
    assert inner.sums == plain.sums
    assert len(inner.records) <= len(plain.records)
    if steps:
        assert inner.records[-1][0].num_running_reqs == steps[-1][1]


def test_steps_of_an_interval_are_one_record():
    now_s, inner = 0.0, Inner()
    merged = MergedStats(inner, clock=lambda: now_s)
    for number in range(100):
        now_s = 1.0 + 0.005 * number
        merged.record(step(2, 10, 1, kv_cache_usage=0.01 * number), None)
    assert len(inner.records) == 5
    merged.log()
    drafts = {"drafts": 100, "accepted": 100, "accepted 0": 100, "accepted 1": 0}
    assert inner.sums == drafts | {"requests": 100, "queries": 1000, "hits": 500}
    assert inner.records[-1][0].kv_cache_usage == 0.99


EXTERNAL_HIT = {CacheHitSource.EXTERNAL_UNSPECIFIED: 1}


@pytest.mark.parametrize(
    ("stats", "rest"),
    [
        (step(1), {"iteration_stats": IterationStats()}),
        (step(1), {"mm_cache_stats": MultiModalCacheStats(queries=1)}),
        (step(1, running_lora_adapters={"a": 1}), {}),
        (step(1, connector_prefix_cache_stats=PrefixCacheStats()), {}),
        (step(1, prefix={"reset": True}), {}),
        (step(1, prefix={"hits_by_source": EXTERNAL_HIT}), {}),
        (step(1), {"engine_idx": 1}),
        (None, {"iteration_stats": IterationStats()}),
    ],
)
def test_what_cannot_be_merged_goes_out_at_once_behind_what_waits(stats, rest):
    inner = Inner()
    merged = MergedStats(inner, clock=lambda: 1.0)
    merged.record(step(1, 4), None)
    merged.record(step(1, 6), None)
    assert len(inner.records) == 1
    merged.record(stats, rest.pop("iteration_stats", None), **rest)
    assert inner.records[1][0].prefix_cache_stats.queries == 6
    if "engine_idx" in rest:
        # Merged too, with those of that engine.
        merged.log()
        assert inner.records[2][3] == 1
    assert inner.records[2][0] is stats


def test_only_vllms_own_logger_gets_something_in_front():
    prometheus: Any = object.__new__(PrometheusStatLogger)
    loggers = ["text", prometheus, "ours"]
    merge_stats(loggers)
    assert loggers[::2] == ["text", "ours"]
    assert isinstance(loggers[1], MergedStats)
