"""What is asked for: arms, cells, requests, engines, and what cannot be."""

import json
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from loadtest.arms import Arm, parse_arm
from loadtest.engine import cli
from loadtest.engine.loop import REQUESTS_TO_BE_STEADY
from loadtest.engine.models import find_method
from loadtest.engine.plan import (
    PRESETS,
    Block,
    Cell,
    Plan,
    find_gpu,
    longest_prompt,
    make_plan,
    parse_bench_arm,
)
from loadtest.engine.pool import EngineProcess
from loadtest.engine.workloads import MIN_REQUESTS, RequestMaker
from loadtest.environment import REPO
from loadtest.errors import LoadTestError
from loadtest.load.workloads import Conversation
from loadtest.models.recipe import DRAFT_DIR
from serving.offline import start_arguments

OWN_CLASSES = {"scheduler_cls", "worker_cls", "additional_config"}


def plan(*arguments: str, gpu: str | None = "a GPU") -> Plan:
    given = ["--output", "nowhere", "--device", "gpu" if gpu else "cpu", *arguments]
    return make_plan(cli.parse(given), gpu)


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("none", Arm("none")),
        ("fixed", Arm("fixed", 3)),
        ("tetris", Arm("tetris", 2, 2)),
        ("goodput", Arm("goodput", 5)),
        ("cold", Arm("cold", 8)),
        ("adaptive", Arm("adaptive", 5)),
        ("tetris:2+1", Arm("tetris", 2, 1)),
        ("fixed:probabilistic", Arm("fixed", 3, is_drawn=True)),
        ("tetris:2+1:probabilistic", Arm("tetris", 2, 1, is_drawn=True)),
    ],
)
def test_an_arm_reads_back_from_its_name_and_numbers_may_be_left_out(name, arm):
    assert parse_bench_arm(name) == arm == parse_bench_arm(arm.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle", "none, fixed, tetris"),
        ("fixed:0", "at least 1"),
        ("fixed:2+1", "write fixed:2"),
        ("none:1", "write none"),
        ("none:probabilistic", "write none"),
        ("tetris:+2", "no policy"),
        ("adaptive", "no policy"),  # No server offers it.
    ],
)
def test_a_wrong_arm_is_refused_with_the_right_form(text, message):
    with pytest.raises(ValueError, match=message):
        parse_arm(text)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_that_claim_something_measure_long_enough_and_start_anew(preset):
    options = cli.parse(["--output", "nowhere", "--preset", preset])
    # Whoever comes last is compared with all others.
    ours = "none" if preset == "cold" else "goodput"
    assert options.policies[-1].policy == ours
    assert options.concurrency
    if preset != "smoke":
        assert options.window_s >= 30.0
        assert options.rounds >= 3


def test_options_stand_before_the_preset_and_own_models_are_not_padded():
    own = ["--rounds", "7", "--policies", "fixed,fixed:3", "--workloads", "easy"]
    made = plan("--preset", "smoke", *own, "--max-tokens", "33", "--concurrency", "8")
    assert (made.rounds, made.max_tokens, made.window_s) == (7, 33, 0)
    assert made.arms == (Arm("fixed", 3),)
    assert made.cells == (Cell("easy", 0.0, 8),)
    for arguments, size in (
        ([], 100e6),
        (["--target", "mine"], 0),
        (["--target", "mine", "--target-parameters", "2e8"], 2e8),
    ):
        options = cli.parse(["--output", "nowhere", *arguments])
        assert float(options.target_parameters) == size


@pytest.mark.parametrize(
    ("lacks", "gpu", "own", "dtype"),
    [
        (False, None, (), "bfloat16"),
        (True, None, (), "float32"),
        (True, None, ("--dtype", "bfloat16"), "bfloat16"),
        (True, "a GPU", (), "bfloat16"),
    ],
)
def test_engines_compute_in_the_format_a_server_takes(
    lacks, gpu, own, dtype, monkeypatch
):
    monkeypatch.setattr("loadtest.engine.plan.lacks_bfloat16", lambda: lacks)
    made = plan("--preset", "smoke", *own, gpu=gpu)
    assert made.engine["dtype"] == dtype


def test_the_held_out_prompts_are_of_ten_kinds_and_the_head_is_recognised():
    options = cli.parse(["--output", "nowhere", "--preset", "smollm2"])
    lines = (REPO / options.workloads[0]).read_text(encoding="utf-8").splitlines()
    kinds = Counter(json.loads(line)["kind"] for line in lines)
    assert len(kinds) == 10
    assert set(kinds.values()) == {20}
    assert len(set(lines)) == 200
    assert find_method(options.draft) == "eagle3"
    assert find_method(DRAFT_DIR) == "draft_model"


def words_as_tokens(conversation: Conversation) -> list[int]:
    *_, messages = conversation.prompts()
    return [len(w) for message in messages for w in message["content"].split()]


@pytest.fixture
def requests() -> RequestMaker:
    return RequestMaker(words_as_tokens, 2, seed=0, max_tokens=8)


def test_requests_repeat_for_every_arm_and_differ_between_rounds_and_blocks(requests):
    cell, warmer = Cell("mixed", 0.0, 4), Cell("mixed", 1.0, 4)
    assert requests.make(cell, 1) == requests.make(cell, 1)
    assert requests.make(cell, 1).prompts == requests.make(warmer, 1).prompts
    others = [requests.make(cell, 1), requests.make(cell, 2), requests.make(cell, 1, 1)]
    assert len({block.prompts for block in others}) == 3
    for concurrency in (1, 32):
        for block in (
            requests.make(Cell("mixed", 0.0, concurrency), 1),
            requests.make_warm_up(concurrency),
        ):
            assert len(block.prompts) >= REQUESTS_TO_BE_STEADY * concurrency


def test_long_prompts_come_after_short_ones_in_a_drift(requests):
    block = requests.make(Cell("drift-context", 0.0, 2), 1)
    before, after = block.prompts[: block.switch_at], block.prompts[block.switch_at :]
    assert (len(before), len(after)) == (12, MIN_REQUESTS)
    assert max(map(len, before)) <= longest_prompt("mixed")
    assert sum(map(len, after)) / len(after) > 3 * sum(map(len, before)) / len(before)


def test_prompts_of_a_file_are_taken_and_long_ones_left_out(requests, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"one two three\n{'word ' * 3000}\n")
    cell = Cell(str(file), 0.0, 2)

    assert set(requests.make(cell, 1).prompts) == {(3, 3, 5)}
    assert cell.name == "prompts-t0-c2"
    file.write_text("word " * 3000)
    with pytest.raises(LoadTestError, match=f"more than {longest_prompt(str(file))}"):
        requests.make(cell, 1)


def test_arms_differ_in_nothing_but_speculation():
    names = ("none", "fixed:6", "adaptive:6", "tetris:4+2", "goodput:6")
    made = plan("--policies", ",".join(names), "--max-tokens", "64")
    assert made.engine["max_model_len"] == longest_prompt("long-context") + 64 + 6
    started = {arm.name: start_arguments(made.deployment(arm))[0] for arm in made.arms}
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "best"], "--policies: 'best' is no policy"),
        (["--workloads", "medium"], "'medium' is no workload"),
        (["--concurrency", "1,x"], "--concurrency: 'x' is no whole number from 1 up"),
        (["--temperatures", "-1"], "--temperatures begin at 0"),
        (["--target", "/nowhere"], "--target: /nowhere is neither a model folder nor"),
        (["--draft", "/nowhere"], "--draft /nowhere holds no config.json"),
        (["--report-only"], "no measurements"),
        (["--policies", "adaptive"], "adaptive: nothing of the kind with --device cpu"),
    ],
)
def test_what_cannot_be_measured_is_explained(arguments, message, tmp_path, capsys):
    given = ["--preset", "smoke", "--output", str(tmp_path), *arguments]
    try:
        status = cli.main(given)
    except SystemExit as exit_:  # What the parser sees.
        status = exit_.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err


def test_the_gpu_is_named_and_a_host_without_one_refused(monkeypatch):
    library: Any = ModuleType("pynvml")
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetName = lambda handle: "NVIDIA Stand-in"
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert find_gpu() == "NVIDIA Stand-in"
    del library.nvmlInit
    with pytest.raises(LoadTestError, match=r"no NVIDIA GPU .*nvmlInit"):
        find_gpu()


def test_an_engine_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    nowhere = ["--target", str(tmp_path), "--draft", str(tmp_path)]
    deployment = plan(*nowhere).deployment(Arm("none"))
    # Fails at an engine's arguments, without the imports that an engine takes.
    process = EngineProcess("none", deployment, tmp_path / "none.log", json.loads)
    try:
        reason = r"of none failed: TypeError: .*; the end of .*none.log:[\s\S]*Trace"
        with pytest.raises(LoadTestError, match=reason):
            process.wait_until_ready()
        with pytest.raises(LoadTestError, match="of none has ended"):
            process.ask("run", Block((), 1, 0.0, 1, 2))
    finally:
        process.close()
