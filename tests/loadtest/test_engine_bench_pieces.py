"""What a run consists of, and what must be equal for it to go on in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine_bench import environment, run
from loadtest.engine_bench.arms import Arm, parse_arm
from loadtest.engine_bench.environment import describe_conditions, digest_code
from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.plan import PRESETS, Cell, is_sweep, list_cells
from loadtest.engine_bench.report import write_results
from loadtest.engine_bench.run import Bench
from loadtest.engine_bench.settings import BenchSettings, EngineSettings
from loadtest.engine_bench.store import Store
from loadtest.engine_bench.workloads import RequestMaker
from tests.loadtest.test_engine_bench import ENVIRONMENT, measured, words_as_tokens

SWEEP = Cell("mixed", 0.0, 4)
SAMPLED = Cell("mixed", 1.0, 4)
DRIFTING = Cell("drift-context", 0.0, 4)
ARMS = tuple(map(parse_arm, ("none", "fixed:2", "tetris:1+2", "goodput:8")))
LENDER = Arm("fixed", 8)
MODELS = {role: {"digest": role} for role in ("target", "draft")}


def make_settings(folder: Path = Path("models"), **more: Any) -> BenchSettings:
    settings = BenchSettings(
        arms=ARMS,
        cells=(SWEEP, SAMPLED, DRIFTING),
        rounds=1,
        engine=EngineSettings(
            folder / "target", folder / "draft", "bfloat16", 2048, 8, 2048, 1 << 20
        ),
        cpus=(0,),
        max_tokens=64,
        seed=0,
        min_requests=6,
        requests_per_slot=3,
        drift_requests_per_slot=3,
        trace=True,
        sweep_arms=frozenset(ARMS[2:3]),
    )
    return replace(settings, **more)


@pytest.fixture
def make_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[BenchSettings], Bench]:
    monkeypatch.setattr(run, "describe_models", lambda settings: MODELS)
    requests = RequestMaker(words_as_tokens, 2, 0, 6, 3)
    store = Store(tmp_path / "results")
    return lambda settings: Bench(settings, store, requests)


# What is run


def test_settings_of_the_sweep_alone_take_no_part_elsewhere() -> None:
    settings = make_settings()

    assert settings.arms_in(SWEEP) == ARMS
    assert settings.arms_in(SAMPLED) == settings.arms_in(DRIFTING)
    assert ARMS[2] not in settings.arms_in(SAMPLED)


def test_the_full_run_has_fixed_1_to_6_and_a_grid_of_tetris_in_the_sweep() -> None:
    full = PRESETS["full"]
    names = [arm.name for arm in full.arms()]

    assert [f"fixed:{k}" for k in range(1, 7)] == names[1:7]
    assert {f"tetris:{k}+2" for k in range(2, 5)} <= set(names)
    assert full.sweep_arms() < set(full.arms())
    # What comes last is compared with all others.
    assert names[-1].startswith("goodput")
    sweep = [cell for cell in list_cells(full.blocks) if is_sweep(cell)]
    assert [cell.concurrency for cell in sweep] == [1, 2, 4, 8, 16, 32]


def test_drafts_as_deep_as_the_policys_are_recorded_where_bounds_are_wanted(
    make_bench: Callable[[BenchSettings], Bench],
) -> None:
    missing = dict(make_bench(make_settings())._missing_traces())

    speculating = [arm for arm in ARMS if arm.speculates]
    assert missing[SWEEP] == [*speculating, LENDER]
    assert missing[SAMPLED][-1] == LENDER
    # Prices change in a drifting cell: it has no bounds.
    assert LENDER not in missing[DRIFTING]
    assert make_settings(trace=False).lending_arms() == ()


def test_only_engines_that_something_is_missing_of_are_started(
    make_bench: Callable[[BenchSettings], Bench],
) -> None:
    bench = make_bench(make_settings())

    assert bench._needed_arms([(1, SAMPLED)], []) == (ARMS[0], ARMS[1], ARMS[3])
    assert bench._needed_arms([], [(SWEEP, [LENDER])]) == (LENDER,)
    assert bench._needed_arms([(1, SWEEP)], [(SWEEP, [LENDER])]) == (*ARMS, LENDER)


def test_engines_start_anew_after_every_few_rounds(
    make_bench: Callable[[BenchSettings], Bench],
) -> None:
    settings = make_settings(rounds=5, rounds_per_start=2)
    bench = make_bench(settings)
    groups, traces = bench._missing_groups(), bench._missing_traces()

    # The first round is there already: its engines are started for the second alone.
    spans = bench._split_by_starts(groups[len(settings.cells) :], traces)

    assert [{number for number, _ in span} for span, _ in spans] == [{2}, {3, 4}, {5}]
    assert [group for span, _ in spans for group in span] == groups[3:]
    assert [one for _, one in spans] == [(), (), traces]
    assert bench._split_by_starts([], traces) == [([], traces)]


def test_one_start_serves_all_rounds_unless_asked_otherwise(
    make_bench: Callable[[BenchSettings], Bench],
) -> None:
    bench = make_bench(make_settings(rounds=3))
    groups = bench._missing_groups()

    assert bench._split_by_starts(groups, ()) == [(groups, ())]
    assert [name for name, one in PRESETS.items() if one.rounds_per_start] == [
        "cold",
        "gpu",
    ]


def test_a_drift_leaves_a_hundred_steps_to_recover_in() -> None:
    full = PRESETS["full"]
    requests = RequestMaker(
        words_as_tokens,
        2,
        0,
        full.min_requests,
        full.requests_per_slot,
        full.drift_requests_per_slot,
    )
    # Replies of the demo pair's tasks, and tokens a step at most.
    tokens_per_reply, acceptance_length = 54, 4.2
    drifting = [c for c in list_cells(full.blocks) if c.workload.startswith("drift")]

    assert drifting
    for cell in drifting:
        after = requests.count(cell) - requests.requests_per_slot * cell.concurrency
        num_steps = after * tokens_per_reply / (cell.concurrency * acceptance_length)
        assert num_steps > 100
        assert after >= full.min_requests


# What must be equal


def test_conditions_do_not_depend_on_where_the_checkout_is() -> None:
    here, there = (
        describe_conditions(make_settings(Path(folder)), MODELS)
        for folder in ("/here", "/there/else")
    )

    assert here == there
    text = json.dumps(here)
    assert "/here" not in text
    assert str(Path(__file__).resolve().parents[2]) not in text


def test_code_is_compared_file_by_file_under_its_name_in_the_repository() -> None:
    digests = digest_code()

    assert {
        "policies/goodput.py",
        "serving/engine/cpu/scheduler.py",
        "loadtest/engine_bench/closed_loop.py",
        # Turns, cells and presets, the models' room, and the prompts.
        "loadtest/engine_bench/arm_process.py",
        "loadtest/engine_bench/plan.py",
        "loadtest/engine_bench/models.py",
        "loadtest/models/tokenizer.py",
    } <= digests.keys()
    # Reports may change between two pieces of a run.
    assert "loadtest/engine_bench/verdicts.py" not in digests


def test_a_run_that_cannot_go_on_says_which_file_differs_and_no_other(
    make_bench: Callable[[BenchSettings], Bench],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(make_settings())
    bench._store.append_group([measured("none", 1, 100.0)])
    make_bench(make_settings(rounds=9))  # More rounds are no other conditions.

    changed = digest_code() | {"policies/estimators/step_cost.py": "0000"}
    monkeypatch.setattr(environment, "digest_code", lambda: changed)

    named = r"code of policies/estimators/step_cost\.py"
    with pytest.raises(BenchError, match=named) as refusal:
        make_bench(make_settings())
    lines = [line for line in str(refusal.value).splitlines() if "was " in line]
    assert len(lines) == 1


def test_what_is_kept_goes_on_in_another_folder(
    make_bench: Callable[[BenchSettings], Bench], tmp_path: Path
) -> None:
    bench = make_bench(make_settings())
    bench._store.append_group([measured("none", 1, 1.0) | SWEEP.as_dict()])
    moved = tmp_path / "elsewhere"
    bench._store.folder.rename(moved)

    settings = make_settings(Path("/other/models"))
    resumed = Bench(settings, Store(moved), bench._requests)

    assert [cell for _, cell in resumed._missing_groups()] == [SAMPLED, DRIFTING]
    kept = "".join(file.read_text() for file in moved.iterdir() if file.is_file())
    assert str(tmp_path) not in kept


def test_what_traces_said_survives_without_them(
    make_bench: Callable[[BenchSettings], Bench], tmp_path: Path
) -> None:
    bench = make_bench(make_settings(sweep_arms=frozenset()))
    store = bench._store
    names = [arm.name for arm in (*ARMS, LENDER) if arm.speculates]
    line = SWEEP.as_dict() | {"policy": "goodput:8", "num_outcomes": 9}
    errors = {"error": 0.01, "exact_error": 0.01, "confidence_error": 0.1}
    kept = {"policies": names, "bounds": None, "calibration": [line | errors]}
    store.keep_traced({SWEEP.name: kept})
    store.append_group([measured("none", 1, 1.0) | SWEEP.as_dict()])
    store.write_environment(ENVIRONMENT)

    assert SWEEP not in dict(bench._missing_traces())
    assert write_results(store, with_bounds=True)["calibration"] == [line | errors]

    # Where traces are kept, one that is missing is missing.
    path = store.trace_file(SWEEP, ARMS[1].file_name)
    path.parent.mkdir(parents=True)
    path.touch()
    assert dict(bench._missing_traces())[SWEEP] == [*ARMS[2:], LENDER]
