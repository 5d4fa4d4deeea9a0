"""What is asked for: arms, cells, requests, engines, and what cannot be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from loadtest.arms import Arm, parse_arm
from loadtest.client.errors import LoadTestError
from loadtest.engine import cli, gpu
from loadtest.engine.arm_process import ArmProcess
from loadtest.engine.arms import parse_bench_arm
from loadtest.engine.closed_loop import min_requests
from loadtest.engine.plan import PRESETS, Cell, Plan, list_arms, list_cells
from loadtest.engine.workloads import REQUESTS_PER_SLOT, RequestMaker, longest_prompt
from loadtest.load.workloads import Conversation
from serving.offline import start_arguments

OWN_CLASSES = {"scheduler_cls", "worker_cls", "additional_config"}


@pytest.mark.parametrize(
    "name", ["none", "fixed:3", "tetris:2+1", "dynamic:5", "cold:8", "adaptive:4"]
)
def test_an_arm_reads_back_from_its_name(name: str) -> None:
    assert parse_bench_arm(name).name == name


def test_numbers_of_an_arm_may_be_left_out() -> None:
    assert parse_arm("tetris") == Arm("tetris", 2, 2)
    assert parse_arm("goodput") == Arm("goodput", 5)
    assert parse_bench_arm("cold") == Arm("cold", 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle", "none, fixed, tetris"),
        ("fixed:0", "at least 1"),
        ("fixed:2+1", "write fixed:2"),
        ("none:1", "write none"),
        ("tetris:+2", "no policy"),
        ("cold", "no policy"),  # No server offers it.
    ],
)
def test_a_wrong_arm_is_refused_with_the_right_form(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arm(text)


# Presets and cells


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_that_claim_something_measure_long_enough_and_start_anew(
    preset: str, tmp_path: Path
) -> None:
    options = cli.parse(["--output", str(tmp_path), "--preset", preset])
    assert options.cells
    # Whoever comes last is compared with all others.
    ours = options.policies[-1].policy
    assert ours == ("none" if preset == "cold" else "goodput")
    if preset != "smoke":
        assert options.window_s >= 30.0
        assert options.rounds >= 3


def test_the_sweep_has_a_grid_of_tetris_whose_best_is_not_its_edge() -> None:
    arms = list_arms(PRESETS["sweep"]["policies"])
    depths = [arm.draft_tokens for arm in arms if arm.policy == "tetris"]
    assert max(depths) == 8
    assert {2, 3, 4}.issubset(depths)
    cells = list_cells(PRESETS["sweep"]["blocks"])
    assert [cell.concurrency for cell in cells] == [1, 2, 4, 8, 16, 32]


def test_given_axes_replace_those_of_every_block_and_cells_stay_unique() -> None:
    blocks = [
        {"workloads": "mixed", "temperatures": "0", "concurrency": "1,2"},
        {"workloads": "easy,hard", "temperatures": "0,1", "concurrency": "4"},
    ]

    cells = list_cells(blocks, workloads="easy", concurrency="8")

    assert cells == (Cell("easy", 0.0, 8), Cell("easy", 1.0, 8))


def test_options_stand_before_the_preset(tmp_path: Path) -> None:
    options = cli.parse(
        ["--output", str(tmp_path), "--smoke", "--rounds", "7", "--policies", "none"]
    )
    assert (options.rounds, options.max_tokens) == (7, 32)
    assert options.policies == (Arm("none"),)


# Requests


def words_as_tokens(conversation: Conversation) -> list[int]:
    *_, messages = conversation.prompts()
    return [len(w) for message in messages for w in message["content"].split()]


@pytest.fixture
def requests() -> RequestMaker:
    return RequestMaker(words_as_tokens, 2, seed=0, min_requests=6)


def test_requests_repeat_for_every_arm_and_differ_between_rounds_and_blocks(
    requests: RequestMaker,
) -> None:
    cell = Cell("mixed", 0.0, 4)
    assert requests.make(cell, 1) == requests.make(cell, 1)
    assert requests.make(cell, 1) == requests.make(Cell("mixed", 1.0, 4), 1)
    others = [requests.make(cell, 1), requests.make(cell, 2), requests.make(cell, 1, 1)]
    assert len({one.prompts for one in others}) == 3


def test_contexts_become_long_on_the_way(requests: RequestMaker) -> None:
    made = requests.make(Cell("drift-context", 0.0, 4), 1)
    lengths = [len(prompt) for prompt in made.prompts]

    before, after = lengths[: made.switch_at], lengths[made.switch_at :]
    assert len(before) == len(after) == 4 * REQUESTS_PER_SLOT
    assert min(after) > 2 * sum(before) / len(before)
    assert requests.make(Cell("drift-neighbour", 0.0, 4), 1).switch_at == len(before)
    assert requests.make(Cell("mixed", 0.0, 4), 1).switch_at is None


@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_warming_up_reaches_a_steady_part(
    requests: RequestMaker, concurrency: int
) -> None:
    made = requests.make_warm_up(concurrency)
    assert len(made.prompts) >= min_requests(concurrency)


def test_prompts_of_a_file_are_taken_and_long_ones_left_out(
    requests: RequestMaker, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"one two three\n{'word ' * 3000}\n")

    made = requests.make(Cell(str(file), 0.0, 2), 1)

    assert set(made.prompts) == {(3, 3, 5)}
    assert Cell(str(file), 0.0, 2).name == "prompts-t0-c2"
    file.write_text("word " * 3000)
    with pytest.raises(LoadTestError, match=f"more than {longest_prompt(str(file))}"):
        requests.make(Cell(str(file), 0.0, 2), 1)


# Engines


def plan_of(device: str) -> Plan:
    engine = {
        "device": device,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 1 << 24,
        "enable_prefix_caching": False,
    }
    return Plan(
        *((), (), 1, 30.0, 64, engine, Path("target"), Path("draft"), (0,)),
        gpu="a GPU" if device == "gpu" else None,
    )


def test_arms_differ_in_nothing_but_speculation() -> None:
    names = ("none", "fixed:6", "adaptive:6", "tetris:4+2", "goodput:6")
    started = {
        name: start_arguments(plan_of("gpu").deployment(parse_bench_arm(name)))[0]
        for name in names
    }
    own = {*OWN_CLASSES, "speculative_config", "per_request_spec_decode_metrics"}

    shared = [
        {k: v for k, v in one.items() if k not in own} for one in started.values()
    ]
    assert all(one == shared[0] for one in shared)
    assert not OWN_CLASSES & started["none"].keys()
    # On a GPU these two are vLLM alone, as they are in a server.
    for name in ("fixed:6", "adaptive:6"):
        assert not OWN_CLASSES & started[name].keys()
    adaptive = started["adaptive:6"]["speculative_config"]
    assert adaptive.pop("enable_adaptive_verification")
    assert adaptive == started["fixed:6"]["speculative_config"]
    for name in ("tetris:4+2", "goodput:6"):
        assert started[name]["speculative_config"]["num_speculative_tokens"] == 6
        assert started[name].keys() >= OWN_CLASSES


def test_a_held_engine_is_that_of_goodput() -> None:
    cold, goodput = (
        start_arguments(plan_of("cpu").deployment(parse_bench_arm(name)))
        for name in ("cold:8", "goodput:8")
    )
    assert cold == goodput
    assert cold[1]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


# What cannot be


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fixed:1,fixed:1"], "argument --policies: .*twice"),
        (["--policies", "best"], "argument --policies: 'best' is no policy"),
        (["--workloads", "medium"], "argument --workloads: 'medium' is no workload"),
        (["--concurrency", "1,x"], "--concurrency: invalid literal"),
        (["--concurrency", "0"], "requests in flight at 1"),
        (["--temperatures", "-1"], "temperatures begin at 0"),
        (["--minutes", "0"], "argument --minutes"),
        (["--target-parameters", "many"], "argument --target-parameters"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--output", "nowhere", *arguments])

    assert exit_.value.code == 2
    line = capsys.readouterr().err.replace("\n", " ")
    assert re.search(message, line), line
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "/nowhere"], "--target /nowhere holds no model"),
        (["--report-only"], "no measurements"),
        (["--max-model-len", "64"], "--max-model-len 64 is too short"),
        (["--policies", "adaptive"], "adaptive is vLLM's own"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--smoke", "--output", str(tmp_path), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "cold:8"], "--policies cold"),
        (["--workloads", "drift-neighbour"], "--workloads drift-neighbour"),
    ],
)
def test_what_a_gpu_does_not_have_is_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    given = ["--output", str(tmp_path), "--device", "gpu", *arguments]
    with pytest.raises(LoadTestError, match=message):
        cli.make_plan(cli.parse(given), "a GPU")


def test_the_gpu_is_named_and_a_host_without_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library: Any = ModuleType("pynvml")
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetName = lambda handle: "NVIDIA Stand-in"
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpu.find_gpu() == "NVIDIA Stand-in"

    def fail() -> None:
        raise OSError("no driver")

    library.nvmlInit = fail
    with pytest.raises(LoadTestError, match=r"no NVIDIA GPU .*\(no driver\)"):
        gpu.find_gpu()


# Processes


def test_a_process_that_ends_is_reported_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", "raise SystemExit('out of memory')"]
    process = ArmProcess("fixed:1", command, os.environ, tmp_path / "log")
    try:
        with pytest.raises(LoadTestError, match=r"has ended[\s\S]*out of memory"):
            process.receive(120.0)
    finally:
        process.wait_for_end(0.0)


def test_children_end_with_a_controller_that_is_killed() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m',\n"
        "    'loadtest.engine.neighbour', str(os.getpid()),\n"
        "    str(min(os.sched_getaffinity(0)))])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        child = psutil.Process(int(controller.stdout.readline()))
        while child.cpu_times().user < 0.2:  # Until it spins.
            time.sleep(0.05)
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    _, alive = psutil.wait_procs([child], timeout=60.0)
    assert not alive
