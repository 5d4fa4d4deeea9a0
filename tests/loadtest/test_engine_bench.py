"""The engine benchmark's parts that need no engine."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from loadtest.engine_bench.arm_process import ArmProcess
from loadtest.engine_bench.arms import Arm, parse_arm
from loadtest.engine_bench.cli import main
from loadtest.engine_bench.closed_loop import Delivery, min_requests, run_closed_loop
from loadtest.engine_bench.comparison import compare, t_975
from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.measurement import digest_outputs, measure
from loadtest.engine_bench.outcome_bins import bin_outcomes
from loadtest.engine_bench.plan import (
    PRESETS,
    Block,
    Cell,
    list_cells,
    replace_axes,
    shuffle,
)
from loadtest.engine_bench.plots import draw_all
from loadtest.engine_bench.preload import engine_env
from loadtest.engine_bench.progress import Progress
from loadtest.engine_bench.report import write_results
from loadtest.engine_bench.rows import find_differing
from loadtest.engine_bench.settings import EngineSettings
from loadtest.engine_bench.step_errors import watch_step_errors
from loadtest.engine_bench.store import Store
from loadtest.engine_bench.tables import ratio_table, throughput_table
from loadtest.engine_bench.telemetry import Telemetry
from loadtest.engine_bench.trace import Trace, record_trace
from loadtest.engine_bench.traces import load_trace, load_traces
from loadtest.engine_bench.workloads import (
    LONG_PROMPT_TOKENS,
    MAX_LONG_TOKENS,
    RequestMaker,
)
from policies.registry import build_planner
from policies.types import DraftBatch, PolicySpec, StepTiming, VerificationOutcome

CELL = Cell("mixed", 0.0, 4)


# Arms and plan


@pytest.mark.parametrize(
    "name", ["none", "fixed:3", "tetris:2+1", "dynamic:5", "goodput:4"]
)
def test_an_arm_reads_back_from_its_name(name: str) -> None:
    assert parse_arm(name).name == name


def test_numbers_of_an_arm_may_be_left_out() -> None:
    assert parse_arm("tetris") == Arm("tetris", 2, 2)
    assert parse_arm("goodput") == Arm("goodput", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle", "none, fixed, tetris"),
        ("fixed:0", "at least 1"),
        ("fixed:2+1", "write fixed:2"),
        ("none:1", "write none"),
        ("tetris:+2", "no policy"),
    ],
)
def test_a_wrong_arm_is_refused_with_the_right_form(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        parse_arm(text)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_presets_name_policies_and_cells_that_exist(preset: Any) -> None:
    assert preset.arms()
    assert len(set(list_cells(preset.blocks))) == len(list_cells(preset.blocks))


def test_given_axes_replace_those_of_every_block_and_cells_stay_unique() -> None:
    blocks = (
        Block(("mixed",), (0.0,), (1, 2)),
        Block(("easy", "hard"), (0.0, 1.0), (4,)),
    )

    cells = list_cells(replace_axes(blocks, workloads=["easy"], concurrencies=[8]))

    assert cells == (Cell("easy", 0.0, 8), Cell("easy", 1.0, 8))


def test_temperature_zero_is_a_given_axis_too() -> None:
    blocks = replace_axes([Block(("easy",), (1.0,), (1,))], temperatures=[0.0])

    assert list_cells(blocks) == (Cell("easy", 0.0, 1),)


def test_every_arm_takes_every_place_and_follows_every_other() -> None:
    arms = [parse_arm(name) for name in ("none", "fixed:1", "fixed:2")]

    orders = [shuffle(arms, f"round {number}") for number in range(30)]

    assert orders[0] == shuffle(arms, "round 0")
    assert all(len(order) == len(set(order)) == 3 for order in orders)
    assert {pair for order in orders for pair in pairwise(order)} == set(
        permutations(arms, 2)
    )
    assert {order[0] for order in orders} == set(arms)


def test_an_engine_without_speculation_gets_no_drafter_and_no_adapter() -> None:
    settings = EngineSettings(
        Path("target"), Path("draft"), "bfloat16", 2048, 8, 2048, 1 << 20
    )

    plain = settings.llm_args(Arm("none"))
    tetris = settings.llm_args(Arm("tetris", 2, 1))

    assert "speculative_config" not in plain
    assert "scheduler_cls" not in plain
    assert tetris["speculative_config"]["num_speculative_tokens"] == 3
    assert tetris["additional_config"]["tetris"] == {
        "policy": "tetris",
        "draft_tokens": 2,
        "max_draft_tokens": 3,
    }


# Requests


def words_as_tokens(messages: Sequence[dict[str, Any]], with_tools: bool) -> list[int]:
    return [len(w) for message in messages for w in message["content"].split()]


@pytest.fixture
def requests() -> RequestMaker:
    return RequestMaker(words_as_tokens, 2, seed=0, min_requests=6, requests_per_slot=3)


def test_requests_repeat_for_every_arm_and_differ_between_rounds(
    requests: RequestMaker,
) -> None:
    assert requests.make(CELL, 1) == requests.make(CELL, 1)
    assert requests.make(CELL, 1) != requests.make(CELL, 2)


def test_contexts_become_long_after_a_steady_cells_requests(
    requests: RequestMaker,
) -> None:
    made = requests.make(Cell("drift-context", 0.0, 1), 1)
    lengths = [len(prompt) for prompt in made.prompts]

    assert made.switch_at == requests.requests_per_slot
    assert len(lengths) - made.switch_at == requests.drift_requests_per_slot
    assert max(lengths[: made.switch_at]) < LONG_PROMPT_TOKENS[0]
    assert min(lengths[made.switch_at :]) >= LONG_PROMPT_TOKENS[0]
    assert max(lengths) <= MAX_LONG_TOKENS


def test_only_the_neighbour_workload_calls_the_neighbour(
    requests: RequestMaker,
) -> None:
    made = {
        workload: requests.make(Cell(workload, 0.0, 2), 1)
        for workload in ("mixed", "drift-neighbour")
    }

    assert made["drift-neighbour"].neighbour
    assert not made["mixed"].neighbour
    assert made["mixed"].switch_at is None


@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_warming_up_reaches_a_steady_part(
    requests: RequestMaker, concurrency: int
) -> None:
    warm_up = requests.make_warm_up(concurrency)

    assert len(warm_up.prompts) >= min_requests(concurrency)


# Closed loop and measurement


@dataclass
class FakeEngine:
    """Emits `per_step` tokens a step; request i is `lengths[i]` tokens long."""

    lengths: Sequence[int]
    per_step: int = 1
    in_flight: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    now_s: float = 0.0

    def add(self, index: int) -> None:
        self.admitted.append(index)
        self.in_flight[index] = self.lengths[index]

    def step(self) -> list[Delivery]:
        self.seen.append(len(self.in_flight))
        self.now_s += 0.1
        deliveries = []
        for index, left in list(self.in_flight.items()):
            count = min(left, self.per_step)
            self.in_flight[index] -= count
            finished = self.in_flight[index] == 0
            if finished:
                del self.in_flight[index]
            deliveries.append(Delivery(index, [index] * count, finished))
        return deliveries


def run_fake(engine: FakeEngine, concurrency: int, **options: Any) -> Any:
    options.setdefault("on_mark", lambda name: None)
    return run_closed_loop(
        engine,
        len(engine.lengths),
        concurrency,
        clock=lambda: engine.now_s,
        **options,
    )


def test_exactly_the_asked_number_of_requests_is_in_flight_while_steady() -> None:
    engine = FakeEngine(lengths=[3, 5, 4, 7, 2, 6, 5, 3, 4, 5, 6, 2])

    record = run_fake(engine, 3)

    steady = [
        count
        for count, step in zip(engine.seen, record.steps, strict=True)
        if record.start_s < step.end_s <= record.end_s
    ]
    assert steady
    assert set(steady) == {3}


def test_faster_engines_are_measured_over_the_same_requests() -> None:
    lengths = [8] * 12
    finished = []
    for per_step in (1, 2, 4):
        record = run_fake(FakeEngine(lengths, per_step), 2)
        finished.append(
            sum(
                delivery.finished
                for step in record.steps
                if record.start_s < step.end_s <= record.end_s
                for delivery in step.deliveries
            )
        )

    assert finished == [12, 12, 12]


def test_the_same_prompts_are_measured_whoever_ends_together() -> None:
    """Two requests that end in the same step are replaced in one step, too."""
    prompts = []
    for first in ([3, 3, 9, 9], [3, 5, 9, 9], [1, 1, 1, 9]):
        record = run_fake(FakeEngine([*first, *[4] * 8]), 4)
        before = {
            delivery.index
            for step in record.steps
            if step.end_s <= record.start_s
            for delivery in step.deliveries
        }
        prompts.append(sorted(before))
    assert prompts == [[0, 1, 2, 3]] * 3


def test_conditions_change_before_the_request_is_admitted() -> None:
    engine = FakeEngine(lengths=[2] * 8)
    admitted: dict[str, int] = {}

    record = run_fake(
        engine,
        2,
        switch_at=4,
        on_mark=lambda name: admitted.update({name: len(engine.admitted)}),
    )

    assert admitted == {"start": 2, "switch": 4, "end": 8}
    assert record.start_s < record.switch_s < record.end_s


@pytest.mark.parametrize("per_step", [1, 3])
def test_pauses_come_at_the_same_requests_and_take_no_time(per_step: int) -> None:
    lengths = [3, 5, 4, 7, 2, 6, 5, 3, 4, 5, 6, 2]
    engine = FakeEngine(lengths, per_step)
    finished: list[int] = []

    def pause() -> None:
        finished.append(len(engine.admitted) - len(engine.in_flight))
        engine.now_s += 60.0

    record = run_fake(engine, 1, pause_every=5, pause=pause)

    assert finished == [5, 10]
    assert measure(record) == pytest.approx(
        measure(run_fake(FakeEngine(lengths, per_step), 1))
    )


def test_too_few_requests_for_a_steady_part_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 12"):
        run_fake(FakeEngine(lengths=[3] * 11), 4)


def test_without_speculation_the_acceptance_length_is_one() -> None:
    result = measure(run_fake(FakeEngine(lengths=[5] * 8), 2))

    assert result["acceptance_length"] == 1.0
    assert result["itl_p50_ms"] == pytest.approx(100.0)
    assert result["time_per_token_p50_ms"] == pytest.approx(100.0)
    assert result["output_tokens_per_s"] == pytest.approx(20.0)


def test_deliveries_of_several_tokens_shorten_the_time_per_token_only() -> None:
    result = measure(run_fake(FakeEngine(lengths=[9] * 8, per_step=3), 2))

    assert result["acceptance_length"] == 3.0
    assert result["itl_p50_ms"] == pytest.approx(100.0)
    assert result["time_per_token_p50_ms"] == pytest.approx(100.0 / 3)


def test_throughput_before_and_after_the_change_is_told_apart() -> None:
    engine = FakeEngine(lengths=[4] * 12)

    def slow_down(name: str) -> None:
        if name == "switch":
            engine.per_step = 2

    record = run_fake(engine, 2, switch_at=6, on_mark=slow_down)

    assert measure(record)["phases"] == pytest.approx({"before": 20.0, "after": 40.0})


def test_steps_after_the_change_are_kept_with_their_tokens() -> None:
    engine = FakeEngine(lengths=[4] * 12, per_step=2)

    record = run_fake(engine, 2, switch_at=6)
    after = measure(record)["after_switch"]

    steps = [s for s in record.steps if record.switch_s < s.end_s <= record.end_s]
    assert len(after["end_ms"]) == len(after["tokens"]) == len(steps) > 0
    assert after["end_ms"][0] == pytest.approx(100.0)
    assert after["tokens"][:2] == [4, 8]
    assert measure(run_fake(FakeEngine([4] * 12), 2))["after_switch"] is None


def test_digests_tell_which_replies_differ() -> None:
    total, digests = digest_outputs(run_fake(FakeEngine(lengths=[2, 3, 4]), 1))
    other = [digests[0], "other", digests[2]]
    group = [
        {"policy": "none", "digests": digests},
        {"policy": "fixed:1", "digests": other},
    ]

    assert total == 9
    assert find_differing(group) == {"none": 0, "fixed:1": 1}


def test_counters_are_those_of_the_steady_part() -> None:
    counters = {"num_steps": 5, "num_fallbacks": {"a": 1}, "num_cut_tokens": {}}
    counters["planning_seconds_total"] = 1.0
    telemetry = Telemetry(SimpleNamespace(snapshot=lambda: dict(counters)))
    telemetry.mark("start")
    counters |= {"num_steps": 9, "num_fallbacks": {"a": 1, "b": 2}}
    counters["planning_seconds_total"] = 1.25
    telemetry.mark("end")
    counters |= {"num_steps": 99}

    result = telemetry.result()

    assert result["counters"]["num_steps"] == 4
    assert result["counters"]["num_fallbacks"] == {"b": 2}
    assert result["counters"]["planning_seconds_total"] == 0.25


def test_the_step_time_error_is_the_median_over_the_steady_part() -> None:
    seen: list[Any] = []
    planner = SimpleNamespace(
        cost=SimpleNamespace(predict_ms=lambda timing: timing.predicted_ms),
        observe_timing=seen.append,
        choose_depth=lambda num_reqs: 3,
    )
    scheduler = SimpleNamespace(_planner=planner)
    with watch_step_errors(scheduler) as errors:
        assert errors is not None
        for mark, predicted_ms in (
            (None, 90.0),
            ("start", 11.0),
            (None, 9.5),
            (None, 40.0),
            ("end", 90.0),
        ):
            if mark:
                errors.mark(mark)
            timing = SimpleNamespace(predicted_ms=predicted_ms, total_ms=10.0)
            scheduler._planner.observe_timing(timing)
        assert scheduler._planner.choose_depth(1) == 3

    # .1, .05 and 3: one bad step does not make the others bad, as a mean would.
    assert errors.median() == pytest.approx(0.1)
    assert scheduler._planner is planner
    assert len(seen) == 5


def test_a_policy_that_predicts_no_times_has_no_error() -> None:
    with watch_step_errors(SimpleNamespace(_planner=SimpleNamespace())) as errors:
        assert errors is None
    with watch_step_errors(SimpleNamespace()) as errors:
        assert errors is None


def test_a_scheduler_that_counts_nothing_yields_no_counters() -> None:
    telemetry = Telemetry(SimpleNamespace())
    telemetry.mark("start")
    telemetry.mark("end")

    assert telemetry.result()["counters"] is None


# Comparison


def test_what_moves_a_whole_round_cancels_in_the_ratio() -> None:
    theirs = {1: 100.0, 2: 50.0, 3: 200.0}
    ours = {number: 1.1 * value for number, value in theirs.items()}

    ratio = compare(ours, theirs)

    assert ratio is not None
    assert ratio.ratio == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1)
    assert ratio.rounds == 3


def test_the_interval_is_students_on_logarithms() -> None:
    # Log ratios -0.1, 0, 0.1: mean 0, deviation 0.1, t at two degrees 4.303.
    ours = {n: math.exp(0.1 * (n - 2)) for n in (1, 2, 3)}

    ratio = compare(ours, dict.fromkeys(ours, 1.0))

    assert ratio is not None
    assert ratio.ratio == pytest.approx(1.0)
    assert ratio.high == pytest.approx(math.exp(4.303 * 0.1 / math.sqrt(3)))
    assert ratio.low == pytest.approx(1 / ratio.high)


def test_only_common_rounds_are_compared_and_one_has_no_interval() -> None:
    ratio = compare({1: 2.0, 2: 9.0}, {1: 1.0, 3: 1.0})

    assert ratio is not None
    assert (ratio.ratio, ratio.low, ratio.rounds) == (2.0, None, 1)
    assert compare({1: 2.0}, {2: 1.0}) is None


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.706), (30, 2.042), (60, 2.000)])
def test_students_t_agrees_with_published_tables(degrees: int, value: float) -> None:
    assert t_975(degrees) == pytest.approx(value, abs=1.5e-3)


# Store


def measured(policy: str, number: int, speed: float, **more: Any) -> dict[str, Any]:
    speculates = policy != "none"
    counters = {
        "num_steps": 10,
        "num_verified_tokens": 80,
        "num_accepted_tokens": 40,
        "num_fallbacks": {},
        "num_cut_tokens": {},
    }
    return {
        "policy": policy,
        "round": number,
        **CELL.as_dict(),
        "output_tokens_per_s": speed,
        "acceptance_length": 1.5 if speculates else 1.0,
        "itl_p50_ms": 10.0,
        "itl_p99_ms": 20.0,
        "time_per_token_p50_ms": 8.0,
        "phases": None,
        "counters": counters if speculates else None,
        "step_time_error": 0.05 if speculates else None,
        "calibration_bins": None,
        "other_cpu_share": 0.01,
        "num_turns": 6,
        "num_disturbed_turns": 1,
        "waited_s": 2.5,
        "num_requests": 12,
        "num_output_tokens": 300,
        "num_differing_requests": 0,
        **more,
    }


CONDITIONS = {"policies": ["none", "tetris:2+2"], "max_tokens": 96, "dtype": "bfloat16"}


def fill(store: Store, speeds: Iterable[tuple[float, float]]) -> None:
    for number, (none, tetris) in enumerate(speeds, start=1):
        store.append_group(
            [measured("none", number, none), measured("tetris:2+2", number, tetris)]
        )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "results")
    store.check_conditions({**CONDITIONS, "cpus": [0, 1]})
    return store


def test_measured_groups_are_done(store: Store) -> None:
    fill(store, [(100.0, 110.0), (100.0, 110.0)])

    assert store.done() == {(1, CELL), (2, CELL)}


def test_a_group_cut_short_by_a_crash_is_measured_again(store: Store) -> None:
    path = store.folder / "measurements.jsonl"
    path.write_text('[{"policy": "none", "rou')

    assert store.done() == set()
    fill(store, [(100.0, 110.0)])

    speeds = [one["output_tokens_per_s"] for one in store.measurements()]
    assert speeds == [100.0, 110.0]


def test_changed_settings_are_refused_by_name_with_both_values(store: Store) -> None:
    fill(store, [(100.0, 110.0)])

    with pytest.raises(BenchError, match="max_tokens: was 96, is 128") as refusal:
        store.check_conditions({**CONDITIONS, "cpus": [0, 1], "max_tokens": 128})

    assert "--restart" in str(refusal.value)
    assert "dtype" not in str(refusal.value)


def test_settings_may_change_before_anything_is_measured(store: Store) -> None:
    store.check_conditions({**CONDITIONS, "max_tokens": 128})

    assert (store.conditions() or {})["max_tokens"] == 128


def test_a_restart_removes_what_a_run_wrote_and_nothing_else(store: Store) -> None:
    fill(store, [(100.0, 110.0)])
    mine = store.folder / "notes.txt"
    mine.write_text("keep")

    store.clear()

    assert store.measurements() == []
    assert mine.exists()


# Tables


ENVIRONMENT = {
    "machine": {"cpu": "A CPU", "cores": 2},
    "models": {"target": {"parameters": 1e8}, "draft": {"parameters": 5e5}},
    "versions": {"vllm": "0.32.0"},
    "pieces": [{"started": "2026-11-21T03:00:00+00:00"}],
}


def test_results_have_a_row_per_policy_and_a_paired_ratio(store: Store) -> None:
    fill(store, [(100.0, 110.0), (50.0, 55.0)])
    store.write_environment(ENVIRONMENT)

    write_results(store)

    results = json.loads((store.folder / "results.json").read_text())
    none, tetris = results["rows"]
    assert none["verification_success_rate"] is None
    assert tetris["verification_success_rate"] == 0.5
    assert tetris["verified_per_step"] == 8.0
    assert tetris["output_tokens_per_s"] == {"median": 82.5, "min": 55, "max": 110}
    assert tetris["num_output_tokens"] == 600
    (ratio,) = results["ratios"]
    assert (ratio["policy"], ratio["against"]) == ("tetris:2+2", "none")
    assert ratio["ratio"] == pytest.approx(1.1)
    table = (store.folder / "results.md").read_text()
    assert "100.0 M parameters" in table
    assert "| tetris:2+2 | 4 | 55-110 | 8.0 |" in table


def test_the_small_table_shows_speed_acceptance_length_and_success() -> None:
    row = {
        "policy": "none",
        "concurrency": 1,
        "output_tokens_per_s": {"median": 70.4},
        "acceptance_length": 1.0,
        "verification_success_rate": None,
        "verified_per_step": None,
    }
    fixed = row | {
        "policy": "fixed:1",
        "output_tokens_per_s": {"median": 97.0},
        "acceptance_length": 1.561,
        "verification_success_rate": 0.558,
        "verified_per_step": 1.0,
    }
    # An adaptive policy may verify nothing at all.
    idle = row | {"policy": "goodput:5", "concurrency": 4, "verified_per_step": 0.0}

    assert throughput_table([row, fixed, idle]) == "\n".join(
        [
            "| tokens/s (acceptance length, verification success rate) "
            "| 1 request | 4 requests |",
            "| --- | --- | --- |",
            "| none | 70 | - |",
            "| fixed:1 | **97** (1.56, .56) | - |",
            "| goodput:5 | - | **70** (1.00, -) |",
        ]
    )


def test_the_last_policy_is_compared_with_all_others() -> None:
    ratio = {"policy": "fixed:1", "against": "none", "concurrency": 1, "ratio": 1.5}
    interval = {"low": 1.4, "high": 1.6}
    ratios = [
        ratio | interval,
        ratio | interval | {"policy": "tetris:2+2", "ratio": 2.0},
        ratio | {"policy": "tetris:2+2", "against": "fixed:1", "low": None},
    ]

    lines = ratio_table(ratios).splitlines()

    assert lines[0] == "| tetris:2+2 over | 1 request |"
    assert lines[2:] == ["| none | 2.000 (1.400-1.600) |", "| fixed:1 | 1.500 |"]


# Traces and plots


class FakePlanner:
    """Admits one draft of each request."""

    acceptance = SimpleNamespace(
        calibration=SimpleNamespace(predict=lambda confidence, req_ids: confidence / 2)
    )
    cost = SimpleNamespace(predict_ms=lambda timing: 7.0)
    plan = "a plan"

    def select(self, batch: Any) -> Any:
        return SimpleNamespace(num_admitted=np.ones(2, dtype=np.int64), draft_budget=2)

    def choose_depth(self, num_reqs: int) -> int:
        return 3

    def observe(self, outcome: Any) -> None:
        pass

    def observe_timing(self, timing: Any) -> None:
        pass


TIMING = StepTiming(
    num_reqs=2,
    num_decode_tokens=4,
    num_prefill_tokens=0,
    num_context_tokens=50,
    depth=2,
    target_ms=5.0,
    draft_first_ms=0.0,
    draft_next_ms=0.0,
    host_ms=1.0,
)


def record_one_step(scheduler: Any) -> Trace:
    with record_trace(scheduler) as trace:
        assert trace is not None
        assert scheduler._planner is trace
        trace.select(
            SimpleNamespace(
                num_draft_tokens=np.array([2, 1]),
                confidence=np.array([[0.9, 0.8], [0.4, 0.0]]),
                req_ids=("a", "b"),
            )
        )
        trace.choose_depth(2)
        trace.observe(
            SimpleNamespace(
                num_verified=np.array([1, 1]),
                num_accepted=np.array([1, 0]),
                req_ids=("a", "b"),
            )
        )
        trace.observe_timing(TIMING)
    return trace


def test_a_trace_keeps_what_was_offered_admitted_and_accepted(tmp_path: Path) -> None:
    scheduler = SimpleNamespace(_planner=(planner := FakePlanner()))

    trace = record_one_step(scheduler)
    trace.save(tmp_path / "trace.npz")
    recorded = load_trace(tmp_path / "trace.npz")

    assert scheduler._planner is planner
    assert trace.plan == "a plan"
    assert recorded.step("predicted_ms").tolist() == [7.0]
    assert recorded.step("total_ms") == pytest.approx(6.0, abs=1.0)
    assert recorded.step("depth").tolist() == [2.0]
    assert recorded.draft("num_offered").tolist() == [2, 1]
    assert recorded.draft("num_admitted").tolist() == [1, 1]
    probability, happened = recorded.outcomes("predicted")
    # Position 1 of the first request was not verified, so nothing is known about it.
    assert probability.tolist() == pytest.approx([0.45, 0.2])
    assert happened.tolist() == [1.0, 0.0]


def test_what_the_real_planner_predicts_is_kept(tmp_path: Path) -> None:
    planner = build_planner(PolicySpec("goodput", max_draft_tokens=2))
    batch = DraftBatch(np.array([2]), np.array([[0.9, 0.8]]), ("a",), num_decodes=1)
    with record_trace(SimpleNamespace(_planner=planner)) as trace:
        assert trace is not None
        trace.select(batch)
        trace.observe(
            VerificationOutcome(np.array([2]), np.array([1]), ("a",), batch.confidence)
        )
    trace.save(tmp_path / "trace.npz")
    predicted, happened = load_trace(tmp_path / "trace.npz").outcomes("predicted")
    assert happened.tolist() == [1.0, 0.0]
    assert ((predicted > 0.0) & (predicted < 1.0)).all()


class SlowNotes(FakePlanner):
    """Predicts slowly, which only a traced step asks it to do twice."""

    acceptance = SimpleNamespace(
        calibration=SimpleNamespace(
            predict=lambda confidence, req_ids: time.sleep(0.02) or confidence
        )
    )

    def __init__(self) -> None:
        self.told_ms: list[float] = []

    def export_state(self) -> dict[str, Any]:
        return {"calibration": {"slope": 0.5}}

    def observe_timing(self, timing: Any) -> None:
        self.told_ms.append(timing.total_ms)


def test_a_trace_tells_its_window_and_state_and_leaves_its_own_time_out(
    tmp_path: Path,
) -> None:
    scheduler = SimpleNamespace(_planner=(planner := SlowNotes()))
    nothing = SimpleNamespace(req_ids=())
    batch = SimpleNamespace(
        num_draft_tokens=np.array([1, 1]),
        confidence=np.array([[0.9], [0.4]]),
        req_ids=("a", "b"),
    )
    with record_trace(scheduler) as trace:
        assert trace is not None
        for step in range(4):
            trace.select(batch)
            trace.observe(nothing)
            trace.observe_timing(replace(TIMING, host_ms=60_000.0))
            if step in (0, 2):
                trace.mark("start" if step == 0 else "end")
    trace.save(tmp_path / "trace.npz")
    recorded = load_trace(tmp_path / "trace.npz")

    assert recorded.is_steady().tolist() == [False, True, True, False]
    assert recorded.state() == {"calibration": {"slope": 0.5}}
    # At least 20 of the host's 60000 ms were notes, and a busy machine adds a few.
    assert (recorded.step("host_ms")[1:] <= 59_980.0).all()
    assert (recorded.step("host_ms") > 0.0).all()
    # The whole step is shorter by as much, and the planner is told so.
    assert planner.told_ms == pytest.approx(recorded.step("host_ms") + 5.0)
    assert planner.told_ms == pytest.approx(recorded.step("total_ms"))


def test_a_scheduler_without_planner_is_not_traced() -> None:
    with record_trace(SimpleNamespace()) as trace:
        assert trace is None


def test_calibration_error_weighs_bins_by_their_size() -> None:
    # Three predictions of .9, all accepted (off by .1); one of .1, accepted (off .9).
    curve = bin_outcomes(np.array([0.9, 0.9, 0.9, 0.1]), np.ones(4))

    assert curve is not None
    assert curve.error == pytest.approx((3 * 0.1 + 0.9) / 4)
    assert curve.count.tolist() == [1, 3]
    assert bin_outcomes(np.array([]), np.array([])) is None


def test_exact_predictions_are_off_by_chance_alone() -> None:
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(300):
        probability = rng.uniform(0.0, 1.0, 400)
        curve = bin_outcomes(probability, (rng.random(400) < probability).astype(float))
        assert curve is not None
        errors.append((curve.error, curve.exact_error))
    measured_error, exact_error = np.mean(errors, axis=0)
    assert measured_error == pytest.approx(exact_error, rel=0.05)
    assert 0.04 < exact_error < 0.06


def test_opposite_errors_at_two_loads_do_not_cancel(store: Store) -> None:
    fill(store, [(100.0, 110.0)])
    store.write_environment(ENVIRONMENT)
    tetris = parse_arm("tetris:2+2")
    other = Cell("mixed", 0.0, 8)
    store.append_group([measured("none", 1, 9.0) | other.as_dict()])
    for cell, accepted in ((CELL, 1), (other, 0)):
        path = store.trace_file(cell, tetris.file_name)
        path.parent.mkdir(parents=True)
        np.savez(
            path,
            draft_predicted=np.full((50, 1), 0.5),
            draft_confidence=np.full((50, 1), 0.5),
            draft_num_verified=np.ones(50),
            draft_num_accepted=np.full(50, accepted),
        )

    found = write_results(store, with_bounds=True)["calibration"]

    # Pooled, half of what was predicted at .5 was accepted.
    assert [one["error"] for one in found] == [0.5, 0.5]
    assert [one["concurrency"] for one in found] == [4, 8]


def test_plots_are_drawn_from_rows_and_traces(store: Store) -> None:
    pytest.importorskip("matplotlib")
    fill(store, [(100.0, 110.0)])
    store.write_environment(ENVIRONMENT)
    goodput = parse_arm("goodput:3")
    path = store.trace_file(CELL, goodput.file_name)
    path.parent.mkdir(parents=True)
    record_one_step(SimpleNamespace(_planner=FakePlanner())).save(path)

    rows = write_results(store)["rows"]
    traces = load_traces(store.folder / "traces", [CELL], [goodput])
    files = draw_all(store.folder, rows, traces)

    assert {file.name for file in files} == {
        "throughput.png",
        "calibration.png",
        "decisions.png",
        "step_time.png",
    }
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


# Command line and progress


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fixed:1,fixed:1"], "argument --policies: .*twice"),
        (["--policies", "best"], "argument --policies: 'best' is no policy"),
        (["--workloads", "medium"], "argument --workloads: medium: no such workload"),
        (["--concurrency", "1,x"], "argument --concurrency: 'x' is no whole number"),
        (["--temperatures", "-1"], "argument --temperatures"),
        (["--requests-per-slot", "2"], "from 3 up"),
        (["--cpus", "0-9999"], "argument --cpus: .* may use cores"),
        (["--minutes", "0"], "argument --minutes"),
        (["--target-parameters", "many"], "write e.g. 100M"),
    ],
)
def test_a_wrong_argument_is_named_with_what_would_be_right(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--output", "nowhere", *arguments])

    assert exit_.value.code == 2
    line = capsys.readouterr().err.replace("\n", " ")
    assert re.search(message, line), line


def test_a_missing_model_is_named_with_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["--smoke", "--output", str(tmp_path), "--target", str(tmp_path / "none")]
    )

    assert status == 1
    assert "--target" in capsys.readouterr().err


def test_there_is_nothing_to_report_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--report-only", "--output", str(tmp_path)]) == 1
    assert "no measurements" in capsys.readouterr().err


def test_the_time_left_follows_the_kinds_of_cells_still_to_come() -> None:
    progress = Progress(4, StringIO())
    progress.expect("quick", 2)
    progress.expect("slow", 2)

    progress.advance("quick", 1.0, "")
    progress.advance("slow", 9.0, "")

    assert progress.left_s() == pytest.approx(10.0)


# Processes


def test_engines_are_bound_to_their_cores_and_keep_inherited_settings() -> None:
    env = engine_env({"HOME": "/home", "PYTHONPATH": "/old"}, [0, 2], Path("/repo"))

    assert env["OMP_NUM_THREADS"] == "2"
    assert "0,2" in env.get("KMP_AFFINITY", "") + env.get("OMP_PLACES", "")
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert env["PYTHONPATH"] == "/repo:/old"
    assert env["HOME"] == "/home"


def start_neighbour(parent: int, log: Path) -> ArmProcess:
    module = "loadtest.engine_bench.neighbour"
    cpu = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", module, str(parent), str(cpu)]
    return ArmProcess("neighbour", command, os.environ, log, group=0)


def test_a_stopped_process_uses_no_time_until_it_is_resumed(tmp_path: Path) -> None:
    process = start_neighbour(os.getpid(), tmp_path / "log")

    def busy_s() -> float:
        return psutil.Process(process.pid).cpu_times().user

    try:
        assert process.receive_line(120.0) == b"ready"
        process.stop()
        assert process.is_stopped()
        # The kernel shows the state a moment before the process leaves its core.
        time.sleep(1.0)
        spent_s = busy_s()
        time.sleep(0.3)
        assert busy_s() - spent_s <= 0.02

        process.resume()
        deadline_s = time.monotonic() + 120.0
        while busy_s() - spent_s < 0.1:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not process.is_stopped()
    finally:
        process.kill()


def test_a_process_that_ends_is_reported_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", "raise SystemExit('out of memory')"]
    process = ArmProcess("fixed:1", command, os.environ, tmp_path / "log", group=0)
    try:
        with pytest.raises(BenchError, match=r"fixed:1 has ended[\s\S]*out of memory"):
            process.receive_line(120.0)
    finally:
        process.kill()


def test_children_end_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from loadtest.engine_bench.arm_process import ArmProcess\n"
        "child = ArmProcess('neighbour', [sys.executable, '-m',\n"
        "    'loadtest.engine_bench.neighbour', str(os.getpid()),\n"
        "    str(min(os.sched_getaffinity(0)))], os.environ, Path(sys.argv[1]), 0)\n"
        "child.receive_line(120.0)\n"
        "child.stop()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        child = psutil.Process(int(controller.stdout.readline()))
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    _, alive = psutil.wait_procs([child], timeout=60.0)
    assert not alive
