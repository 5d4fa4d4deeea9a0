"""Speculation metrics: the arithmetic of snapshots, and what Prometheus gets to see."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from tests.serving.conftest import MODEL, load, read_logs, wait_until
from tests.serving.fleet import processes


def snapshot(**figures: Any) -> dict[str, Any]:
    empty = {
        "num_steps": 0,
        "num_verified_tokens": 0,
        "num_verified_tokens_per_pos": [],
        "num_fallbacks": {},
    }
    return empty | figures


GROWTH: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "the difference of two": (
        snapshot(num_steps=4, num_verified_tokens=10),
        snapshot(num_steps=6, num_verified_tokens=13),
        {"num_steps": 2, "num_verified_tokens": 3},
    ),
    "what appears later starts at zero": (
        snapshot(num_verified_tokens_per_pos=[5]),
        snapshot(num_verified_tokens_per_pos=[7, 1], num_fallbacks={"an_error": 2}),
        {"num_verified_tokens_per_pos": [2, 1], "num_fallbacks": {"an_error": 2}},
    ),
    "a restarted engine counts from zero": (
        snapshot(num_steps=100, num_verified_tokens=50),
        snapshot(num_steps=3, num_verified_tokens=60),
        {"num_steps": 3, "num_verified_tokens": 60},
    ),
    "what a policy counts itself, without its gauges": (
        snapshot(num_steps=1, planner={"num_cost_resets": 1, "step_time_error": 0.1}),
        snapshot(num_steps=2, planner={"num_cost_resets": 3, "step_time_error": 0.2}),
        {"num_cost_resets": 2, "step_time_error": None},
    ),
    "what is not reported": ({}, snapshot(), {"selection_seconds_total": None}),
}


@pytest.mark.parametrize(("before", "after", "expected"), GROWTH.values(), ids=GROWTH)
def test_figures_grow_from_one_snapshot_to_the_next(before, after, expected):
    from serving.replica.metrics import growth

    grown = growth(before, after)
    assert {name: grown.get(name) for name in expected} == expected


@pytest.mark.anyio
@pytest.mark.faults
async def test_failing_snapshots_are_counted_logged_once_and_survived(monkeypatch):
    from serving.replica import metrics

    told: list[str] = []
    recorder = SimpleNamespace(
        record=lambda _: told.append("recorded"),
        record_failure=lambda: told.append("failed"),
    )

    async def take_snapshot() -> dict[str, Any]:
        if told.count("failed") < 3:
            raise RuntimeError("no engine")
        return snapshot()

    logged: list[str] = []
    monkeypatch.setattr(metrics.logger, "exception", logged.append)
    polling = asyncio.create_task(
        metrics.poll_snapshots(take_snapshot, recorder, period_s=0.001)
    )
    while "recorded" not in told:
        await asyncio.sleep(0.001)
    polling.cancel()
    assert told[:4] == ["failed"] * 3 + ["recorded"]
    assert logged == ["Some metrics are missing until this passes"]


@pytest.mark.ray
def test_figures_reach_prometheus_labelled_by_deployment_replica_and_policy(server):
    """helm/test_live looks at each that a panel shows, vLLM's own among them."""
    assert server.complete(max_tokens=48, ignore_eos=True).is_success
    name = "ray_tetris_draft_tokens_verified_total"
    (sample, *_) = wait_until(lambda: server.samples(name), 120)
    assert sample.labels["application"] == "tetris"
    assert sample.labels["deployment"] == f"TetrisEngine:{MODEL}"
    assert sample.labels["policy"] == "tetris"
    assert sample.labels["replica"]
    assert not {"request", "request_id"} & sample.labels.keys()


@pytest.mark.ray
def test_what_vllm_notes_of_every_step_is_summed_up_now_and_then(server):
    """Its logger keeps four lists of drafted steps until it is told to log.

    Twice: the task that tells it goes on.
    """
    with load(server, num_clients=1):
        logged = "SpecDecoding metrics: "
        wait_until(lambda: read_logs(server).count(logged) >= 2, 60)
    # A worker of its own would keep the engine core spinning for its answers.
    assert processes(server, "engine")
    assert not processes(server, "worker")


@pytest.mark.ray
def test_nobody_is_started_for_usage_statistics_that_nobody_wants(server):
    titles = []
    for process in server.command.descendants():
        with contextlib.suppress(psutil.Error):
            titles.append(" ".join(process.cmdline()))
    assert any("ray::ServeReplica" in title for title in titles)
    assert not any("TelemetryAgent" in title for title in titles)


class FakeGauge:
    """Keeps what Ray would export."""

    exported: ClassVar[dict[tuple[str, str | None], float]] = {}

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def set(self, value: float, labels: dict[str, str]) -> None:
        self.exported[self.name, labels.get("over")] = value


def test_a_gain_is_exported_with_its_interval_once_it_can_be_told(monkeypatch):
    from serving.replica import metrics

    monkeypatch.setattr(metrics.metrics, "Gauge", FakeGauge)
    monkeypatch.setattr(metrics.metrics, "Counter", FakeGauge)
    recorder = metrics.SpeculationMetrics("goodput")
    recorder.record(snapshot(planner={"audit_cost_share": 0.002}))
    assert FakeGauge.exported["tetris_audit_cost_ratio", None] == 0.002
    assert not any("gain" in name for name, _ in FakeGauge.exported)
    ends = {"": 1.31, "_lower": 1.27, "_upper": 1.35}
    told = {f"speculation_gain_none{end}": ratio for end, ratio in ends.items()}
    recorder.record(snapshot(planner=told))
    for end, ratio in ends.items():
        name = f"tetris_speculation_gain{end}_ratio"
        assert FakeGauge.exported[name, "none"] == ratio
        assert (name, "best_fixed") not in FakeGauge.exported
