"""The paper's experiments: arms, datasets, figures, and one run on a real engine."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.intervals import show_ratio
from loadtest.models.recipe import DRAFT_DIR, TARGET_DIR
from loadtest.paper.cli import main, parse
from loadtest.paper.datasets import load_prompts
from loadtest.paper.grid import ENGINES_AT_ONCE, PRESETS, is_baseline, make_arms
from loadtest.paper.report import render
from loadtest.paper.run import Runner
from loadtest.paper.summary import judge, list_missing, measure_run, summarise
from loadtest.result_folder import ResultFolder
from policies.paper import PaperPlanner
from policies.registry import build_planner
from policies.testing import check_planner
from policies.types import DraftBatch, EngineLimits, PolicySpec

ROOT = Path(__file__).parents[2]


def test_the_paper_s_grid_has_all_its_arms_and_each_has_its_turn(tmp_path):
    arms = make_arms(PRESETS["full"])
    # none, SD 6, DSD, TETRIS 6 x 3, DSD with TETRIS 3, ours.
    assert len(arms) == 1 + 6 + 1 + 18 + 3 + 1
    for arm in arms[1:]:
        policy = arm.settings()
        spec = PolicySpec(
            policy["name"],
            draft_tokens=policy.get("draft_tokens", 1),
            max_draft_tokens=policy.get("max_draft_tokens", policy.get("draft_tokens")),
            params=policy.get("params", {}),
        )
        assert build_planner(spec).choose_depth(8) >= 0
    pair = ["--target", str(TARGET_DIR), "--draft", str(DRAFT_DIR)]
    options = parse(["--output", str(tmp_path), *pair])
    runner = Runner(options, ResultFolder(tmp_path), {"own": []})
    turns = runner.find_turns()
    assert {turn.round for turn in turns} == {1, 2, 3, 4}
    assert {cell.cap for turn in turns for cell in turn.cells} == {8, 32}
    first = [turn for turn in turns if turn.round == 1]
    # Baselines are in every group, and all others in one.
    names = Counter(arm.name for turn in first for arm in turn.arms)
    assert max(len(turn.arms) for turn in first) <= ENGINES_AT_ONCE
    assert names == {
        arm.name: len(first) if is_baseline(arm.name) else 1
        for arm in make_arms(PRESETS["here"])
    }


@pytest.mark.parametrize(("draft_tokens", "extra"), [(0, 0), (0, 2), (3, 2)])
def test_its_planner_keeps_the_contract(draft_tokens, extra):
    check_planner(
        lambda limits: PaperPlanner(5, limits, draft_tokens=draft_tokens, extra=extra),
        max_depth=5,
    )


def test_it_turns_on_from_a_batch_size_up():
    planner = PaperPlanner(
        5, EngineLimits(), draft_tokens=3, extra=2, turn_on_batch_size=2
    )
    assert planner.choose_depth(1) == 3
    assert planner.choose_depth(2) == 5
    confidence = np.array([[0.9] * 5, [0.1] * 5])
    lengths = np.array([5, 5])
    batch = DraftBatch(
        req_ids=("a", "b"), num_draft_tokens=lengths, confidence=confidence
    )
    selection = planner.select(batch)
    assert selection.num_admitted.sum() == selection.draft_budget == 6
    assert selection.num_admitted[0] == 5
    alone = DraftBatch(
        req_ids=("a",), num_draft_tokens=lengths[:1], confidence=confidence[:1]
    )
    assert planner.select(alone).num_admitted.tolist() == [5]


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_draft_tokens 3"):
        PaperPlanner(3, EngineLimits(), draft_tokens=3, extra=1)


def test_datasets_come_in_the_forms_of_their_sources(tmp_path):
    sharegpt = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    sharegpt.write_text(json.dumps([{"conversations": turns}] * 3))
    arena = tmp_path / "arena.jsonl"
    asked = {"conversation_a": [{"role": "user", "content": "Why?"}]}
    arena.write_text("\n".join([json.dumps(asked)] * 2))
    sonnet = tmp_path / "sonnet.txt"
    sonnet.write_text("\n".join(f"line {n}" for n in range(25)))
    tough = tmp_path / "tough.json"
    tough.write_text(sharegpt.read_text())
    files = {"sharegpt": sharegpt, "arena": arena, "sonnet": sonnet, "tough": tough}
    found = load_prompts(files, ["own", "sharegpt", "sonnet", "mix", "all_mix"], 0)
    assert len(found["own"]) == 200
    texts = {
        name: [one.messages[-1]["content"] for one in conversations]
        for name, conversations in found.items()
    }
    assert texts["sharegpt"] == ["Hi"] * 3
    assert texts["mix"][1::2] == ["Hi"] * 3
    assert set(texts["mix"][::2]) == set(texts["sonnet"])
    assert len(texts["sonnet"]) == 3
    assert len(texts["all_mix"]) == 8
    arena.write_text('{"conversation_a": 3}')
    with pytest.raises(LoadTestError, match=r"arena\.jsonl, line 1"):
        load_prompts(files, ["arena"], 0)
    with pytest.raises(LoadTestError, match="--file tough=FILE"):
        load_prompts({}, ["tough"], 0)


RECORD = {
    "dataset": "own",
    "cap": 4,
    "seconds": 2.0,
    "num_steps": 10,
    "first_s": [0.5, 1.0],
    "last_s": [1.5, 2.0],
    "num_tokens": [11, 11],
    "counters": {
        "num_verified_tokens": 20,
        "num_accepted_tokens": 10,
        "num_drafts": 12,
        "num_accepted_tokens_per_pos": [7, 3],
    },
    "stages_ms": {
        "score": 800,
        "verify": 200,
        "draft": 500,
        "select": 100,
        "rest": 100,
    },
}


def test_figures_are_what_their_names_say():
    expected = {"tokens_per_s": 11, "ttft_mean_ms": 750, "tpot_mean_ms": 100}
    # 20 tokens after the first ones, over 20 drafts and 10 requests in steps.
    expected |= {"vsr": 0.5, "ter": 22, "system_efficiency": 20 / 30}
    expected |= {"hidden_tokens_per_s": 22 / 1.5}
    expected |= {"draft_step_ms": 50, "select_step_ms": 10}
    found = measure_run(RECORD)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_of_what_takes_unknown_time_no_stage_is_told():
    stages = RECORD["stages_ms"] | {"rest": 1000}
    found = measure_run(RECORD | {"stages_ms": stages})
    assert np.isnan([found["ter"], found["draft_step_ms"]]).all()
    assert found["vsr"] == 0.5


def test_ratios_are_paired_by_start_and_windows_counted():
    # The machine is slower from start to start; each group has the baselines.
    records = [
        RECORD
        | {"run": run, "start": f"{run}.{group}", "arm": arm}
        | {"seconds": seconds * (1 + run + group)}
        for run in range(3)
        for group, more in enumerate(("TETRIS k=1 E=1", "TETRIS k=1 E=2"))
        for arm, seconds in (
            ("none", 3.0),
            ("SD k=1", 2.0),
            ("SD k=3", 1.0),
            (more, 0.8 - 0.3 * group),
        )
    ]
    rows = {row["arm"]: row for row in summarise(records)}
    over = rows["SD k=3"]["over_none"]
    assert over["ratio"] == pytest.approx(3.0)
    assert over["high"] - over["low"] == pytest.approx(0.0, abs=1e-9)
    assert rows["SD k=1"]["windows"] == [6 * 5, 6 * 4, 6 * 3]
    assert rows["none"]["over_none"] is None
    best = rows["TETRIS k=1 E=1"]["over_best"]
    assert (best["against"], best["rounds"]) == ("SD k=3", 3)
    assert best["ratio"] == pytest.approx(1 / 0.8)

    [verdict] = judge(records)
    assert verdict["arm"] == "TETRIS k=1 E=2"
    assert verdict["over_best"]["ratio"] == pytest.approx(2.0)
    assert verdict["over_best_sd"]["low"] == pytest.approx(2.0)


def test_what_was_left_out_of_the_paper_s_grid_is_named():
    own = {"datasets": ["own"], "gpu": None}
    missing = list_missing(PRESETS["here"] | own)
    assert "k 2, 4, 6" in missing
    assert "E 3" in missing
    assert "batch caps 64" in missing
    assert "mixed difficulty" in missing
    whole = {"datasets": ["sharegpt", "arena", "tough", "sonnet", "mix", "all_mix"]}
    assert not list_missing(PRESETS["full"] | whole | {"gpu": "H100"})


def test_the_committed_page_and_what_is_said_of_it_are_the_committed_figures():
    folder = ROOT / "loadtest" / "results" / "paper-cpu"
    results = json.loads((folder / "results.json").read_text("utf-8"))
    assert (folder / "results.md").read_text("utf-8") == render(results)
    rows = {(row["cap"], row["arm"]): row for row in results["rows"]}
    small, large = results["verdicts"]
    assert (small["cap"], large["cap"]) == (8, 32)
    speeds = {
        arm: row["tokens_per_s"]["mean"]
        for (cap, arm), row in rows.items()
        if cap == 32
    }
    assert max(speeds, key=speeds.__getitem__) == "none"
    shares = [rows[8, arm]["vsr"]["mean"] for arm in ("TETRIS k=1 E=1", "SD k=1")]
    ours = (rows[cap, "ours k<=5"]["over_best"] for cap in (8, 32))
    ratios = (one["over_best"] for one in results["verdicts"])
    figures = [f"{share:.2f}" for share in shares]
    figures += [show_ratio(one) for one in (*ratios, *ours)]
    page = (ROOT / "loadtest" / "README.md").read_text("utf-8")
    said = " ".join(page.partition("(results/paper-cpu/results.md)")[2].split())
    said = said.partition(" ## ")[0]
    places = [said.find(figure) for figure in figures]
    assert places == sorted(places)
    assert min(places) >= 0


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_on_a_real_engine_and_one_that_goes_on(tmp_path, capsys):
    words = ["--preset", "smoke", "--output", str(tmp_path)]
    pair = ["--target", "configs/models/demo-target"]
    pair += ["--draft", "configs/models/demo-draft"]
    pair += ["--arms", "TETRIS*"]
    assert main([*words, *pair, "--minutes", "1e-9"]) == 3
    assert main([*words, *pair]) == 0
    [row] = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["arm"] == "TETRIS k=1 E=1"
    assert 0.0 < row["vsr"]["mean"] < 1.0
    assert sum(row["stages"].values()) == pytest.approx(1.0)
    assert (tmp_path / "results.png").stat().st_size > 10_000
    before = (tmp_path / "measurements.jsonl").read_bytes()
    assert main([*words, *pair]) == 0
    assert (tmp_path / "measurements.jsonl").read_bytes() == before
    assert main([*words, *pair, "--acceptance", "0.5"]) == 1
    assert "--device gpu" in capsys.readouterr().err
    # Another pair must not be mixed in.
    assert main([*words, "--draft", "configs/models/demo-draft"]) == 1
    assert "--restart" in capsys.readouterr().err
