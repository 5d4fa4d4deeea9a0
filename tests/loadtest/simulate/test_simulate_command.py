"""`tetris-serve simulate`, and the loads it draws."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from loadtest.environment import REPO
from loadtest.simulate import page
from loadtest.simulate.cli import main
from loadtest.simulate.compare import Plan
from loadtest.simulate.engine import MODELS
from loadtest.simulate.load import (
    Lengths,
    Load,
    draw_requests,
    parse_arrivals,
    read_load,
)
from loadtest.simulate.output import FOLDER
from loadtest.simulate.traces import read_trace
from serving.settings.sections import ReplicaSettings

SAMPLES = REPO / "loadtest" / "simulate" / "samples"
SCENARIOS = REPO / "configs" / "scenarios"
HELM = REPO / "helm" / "tetris-serve"
DRAFTS = FOLDER.parent / "ablations" / "drafts"
SMALL = ["--replicas", "4", "--requests", "400", "--seeds", "3"]


def run(folder: Path, flags: str) -> dict[str, Any]:
    """Return what a command writes as JSON."""
    path = folder / "result.json"
    assert main([*SMALL, *flags.split(), "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@pytest.mark.parametrize("text", ["poisson", "gamma=3", "diurnal=9"])
def test_loads_keep_their_rate_and_their_shape(text: str) -> None:
    when = parse_arrivals(text).draw(100_000, 50.0, np.random.default_rng(0))
    gaps = np.diff(when)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    if text == "diurnal=9":
        counts, _ = np.histogram(when, bins=np.linspace(0, 2000, 41))
        assert counts[19:21].mean() / counts[0] == pytest.approx(9, rel=0.15)
    else:
        cv = {"poisson": 1, "gamma=3": 3}[text]
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_lengths_have_heavy_tails_and_kinds_shift_in_mid_run() -> None:
    shares = {"hard_before": 0.1, "hard_after": 0.7}
    load = Load(prompt=Lengths(300, 2), output=Lengths(200, 0), **shares)
    found = draw_requests(load, 200_000, 10.0, 1)
    prompts = found.num_prompt_tokens
    assert [prompts.mean(), prompts.std()] == pytest.approx([300, 600], rel=0.1)
    assert (found.num_output_tokens == 200).all()
    halves = found.kind.reshape(2, -1).mean(axis=1)
    assert halves == pytest.approx([0.1, 0.7], abs=0.01)


def test_the_table_is_on_stdout_and_equal_runs_write_equal_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    assert [main([*SMALL, "--json", str(file)]) for file in files] == [0, 0]
    texts = [file.read_text("utf-8") for file in files]
    out, err = capsys.readouterr()
    assert texts[0] == texts[1]
    assert "100%" in err
    for word in ("goodput", "TTFT p99", "TPOT p50", "over round-robin"):
        assert word in out
    arms = json.loads(texts[0])["points"][0]["arms"]
    assert len(arms["power-of-two"]["runs"]) == 3
    ratio = arms["power-of-two"]["ratios"]["ttft_p99_ms"]
    ours, first = (
        np.log([run["ttft_p99_ms"] for run in arms[arm]["runs"]])
        for arm in ("power-of-two", "round-robin")
    )
    mean = (ours - first).mean()
    # 4.303 is the t quantile for two degrees of freedom.
    half = 4.303 * np.std(ours - first, ddof=1) / np.sqrt(3)
    ends = np.exp([mean, mean - half, mean + half])
    assert list(ratio.values()) == pytest.approx(ends, rel=1e-3)


def test_autoscalers_are_arms_that_cost_replica_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = "target-ongoing:4", "target-ongoing:60"
    # A handful at a time is more than four for longer than the delay.
    flags = "--utilisation 0.05 --start-s 5 --requests 2000 --seeds 2 --autoscaler "
    (point,) = run(tmp_path, flags + " --autoscaler ".join(arms))["points"]
    assert "replica-hours" in capsys.readouterr().out
    means = (point["arms"][arm]["means"] for arm in arms)
    many, few = (one["replica_hours"]["value"] for one in means)
    assert 0 < few < many


def test_a_deployment_s_settings_are_its_replicas_and_their_autoscaler(
    tmp_path: Path,
) -> None:
    files = sorted((SCENARIOS.parent).glob("*.yaml"))
    assert files
    for path in files:
        settings = yaml.safe_load(path.read_text())
        found = run(tmp_path, f"--deployment {path} --seeds 1")
        batch = settings["engine"]["max_num_seqs"]
        assert found["engine"]["costs"]["max_num_seqs"] == batch
        (point,) = found["points"]
        (arm,) = point["arms"]
        assert arm.partition(":")[0] in ("ours", "target-ongoing")
        replicas = ReplicaSettings(**settings["replicas"])
        growth = {
            "most": 4,
            "least": replicas.min,
            "up_delay_s": replicas.upscale_delay_s,
            "down_delay_s": replicas.downscale_delay_s,
        }
        assert growth.items() <= point["growth"].items()
    # Whoever asks for routers gets no autoscaler, and a scenario can name the file.
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(f"deployment: {files[0]}\nrouter: ours\nselect: false", "utf-8")
    found = run(tmp_path, str(scenario))
    (point,) = found["points"]
    assert (list(point["arms"]), found["engine"]["costs"]["rule"]) == (["ours"], 0)


def test_a_chart_s_deployment_costs_more_with_ten_times_the_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart, path = HELM / "examples" / "production.yaml", tmp_path / "result.json"
    flags = f"--deployment {chart} --requests 2000 --rate 100 --seeds 1 --json {path}"
    scales = "--scale-load 1 --scale-load 10 --start-s 1"
    assert main([*flags.split(), *scales.split()]) == 0
    assert "downscale-delay-s 600; take more" in capsys.readouterr().err
    once, ten = json.loads(path.read_text("utf-8"))["points"]
    assert (once["num_replicas"], ten["num_replicas"]) == (8, 80)
    assert ten["rate_per_s"] == 10 * once["rate_per_s"]
    assert ten["num_requests"] == 10 * once["num_requests"]
    (few,), (many,) = ([*one["arms"].values()] for one in (once, ten))
    # The file keeps two, of which one would do.
    assert few["means"]["replicas"]["value"] == 2
    assert many["means"]["replicas"]["value"] > 5
    hours = [one["means"]["replica_hours"]["value"] for one in (few, many)]
    assert hours[1] > 3 * hours[0]
    bad = tmp_path / "bad.yaml"
    text = chart.read_text("utf-8").replace("    min: 2", "    mni: -2", 1)
    bad.write_text(text.replace("max_num_seqs: 96", "max_num_seqs: 0"), "utf-8")
    assert main(["--deployment", str(bad)]) == 1
    err = capsys.readouterr().err
    assert "config: replicas.mni: unknown setting; did you mean min?" in err
    assert "config: engine.max_num_seqs: must be" in err


def test_the_page_has_every_plot_there_are_figures_for(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("result.json", "p.html", "again.html")]
    sweep = "--scale-load 0.5 --scale-load 1"
    ages = "--staleness-ms 0 --staleness-ms 100"
    grow = "--autoscaler target-ongoing:4 --utilisation 0.05"
    plots = {
        "Attainment against load": [True, True, False],
        "Goodput against staleness": [True, False, False],
        "Replicas over time": [False, True, False],
        "TTFT: distribution": [True, True, True],
        "TPOT: distribution": [True, True, True],
    }
    for place, flags in enumerate((f"{sweep} {ages}", f"{sweep} {grow}", "")):
        run(tmp_path, f"{flags} --html {files[1]}")
        text = files[1].read_text("utf-8")
        for title, there in plots.items():
            assert (f'<img alt="{title}' in text) == there[place]
        assert "h100-qwen3-1.7b, " in text
        assert "3 seeds (0 to 2)" in text
        assert "numpy 2" in text
        assert page.main([str(files[0]), str(files[2])]) == 0
        assert text == files[2].read_text("utf-8")


def test_recorded_drafts_stand_in_for_chances(tmp_path: Path) -> None:
    chances, recorded = (
        run(tmp_path, f"--router ours {flags}")["engine"]["tokens_per_step"]
        for flags in ("", f"--recorded {DRAFTS} --select")
    )
    easy, hard = recorded
    assert chances != recorded
    assert 2.0 < hard < easy < 4.0  # Of three drafts and the target's own token.


def test_slow_replicas_can_do_less(tmp_path: Path) -> None:
    alike, mixed = (
        run(tmp_path, f"--router ours --utilisation 0.7 {flags}")["points"][0]
        for flags in ("", "--slow-replicas 0.5:2")
    )
    assert mixed["rate_per_s"] == pytest.approx(0.75 * alike["rate_per_s"])
    assert mixed["utilisation"] == pytest.approx(0.7)


@pytest.mark.parametrize("sample", sorted(SAMPLES.iterdir()), ids=lambda one: one.name)
def test_traces_keep_their_bursts_and_lengths_at_another_rate(sample: Path) -> None:
    found = read_trace(sample)
    reference = read_trace(SAMPLES / "azure.csv")
    num_left_out = reference.arrival_s.size - found.arrival_s.size
    assert num_left_out == ("burstgpt" in sample.name)  # One reply failed.
    begin = reference.arrival_s[num_left_out]
    times = reference.arrival_s[num_left_out:] - begin
    assert found.arrival_s == pytest.approx(times, abs=1.01)
    load = read_load(sample, 0.5, 0.5)
    drawn = draw_requests(load, 100, 20.0, 0)
    assert drawn.arrival_s[-1] == pytest.approx(5.0)
    stretch = drawn.arrival_s[1:] * found.arrival_s[99]
    assert stretch == pytest.approx(found.arrival_s[1:100] * 5.0)
    outputs = reference.num_output_tokens[num_left_out:]
    assert (found.num_output_tokens == outputs).all()


def test_scenario_files_are_options_and_flags_count_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(SCENARIOS.iterdir()):
        found = run(tmp_path, f"{path} --router ours --rate 90 --scale-load 1")
        point = found["points"][0]
        assert (point["num_replicas"], point["rate_per_s"]) == (4, 90.0)
        assert list(point["arms"]) == ["ours"]
        shifts = path.stem in ("diurnal-autoscalers", "shifting-bursts")
        assert found["load"]["hard_before"] == (0.2 if shifts else 0.5)
    bad = tmp_path / "bad.yaml"
    bad.write_text("replicants: 3", "utf-8")
    assert main([str(bad)]) == 1
    message = f"scenario {bad}: no option 'replicants'; see replicas"
    assert message in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml")]) == 1


def test_what_makes_no_sense_is_explained_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(MODELS["cpu-demo-100m"].read_text("utf-8"))
    del data["terms"]["token_ms"]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(data), "utf-8")
    for section, key in (("device", "flops"), ("limits", "max_num_seqs")):
        model = json.loads(MODELS["h100-qwen3-1.7b"].read_text("utf-8"))
        model[section][key] = 0
        (tmp_path / f"{key}.json").write_text(json.dumps(model), "utf-8")
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4")
    (tmp_path / "on.yaml").write_text("on: 3", "utf-8")
    burst = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    burst += ["2030-01-01 00:00:00,9,9"] * 400
    (tmp_path / "burst.csv").write_text("\n".join(burst), "utf-8")
    azure = f"--trace {SAMPLES}/azure.csv --requests 100"
    cases = {
        "invalid choice: 'best'": "--router best",
        "'ours' is no NAME:TARGET; names are target-": "--autoscaler ours",
        "'uniform' is no load; write poisson, gamma=CV": "--load uniform",
        "not allowed with": "--rate 3 --utilisation 1",
        "'0' is no number from": "--rate 0",
        "'2' is no number from 0 to 1": "--hard-share 0.2:2",
        "'gpt' is no engine model: cpu-demo-100m, h100-": "--engine gpt",
        "'token_ms' is missing": f"--engine {broken}",
        "leave out --router": "--autoscaler ours:4 --router ours",
        "there are 4 --replicas at most": "--autoscaler ours:4 --min-replicas 9",
        "has 120 requests: take": f"--trace {SAMPLES}/azure.csv",
        "is of no form of Azure": f"--trace {REPO}/README.md",
        "take 100 or more": "--requests 99",
        "take a smaller --batch": "--batch 9000",
        "no recorded drafts": f"--recorded {SAMPLES}",
        "recorded ones are 8 long": f"--drafts 9 --recorded {DRAFTS}/list1",
        "cannot be written (No such file": f"--json {tmp_path}/no/f",
        "cannot be written (File name too": f"--json {tmp_path}/{'f' * 300}",
        "no option True; see": f"{tmp_path}/on.yaml",
        "File is not a zip file": f"--recorded {tmp_path}",
        "division by zero": f"--engine {tmp_path}/flops.json",
        "max_num_seqs must be 1": f"--engine {tmp_path}/max_num_seqs.json",
        "400 requests come at once": f"--trace {tmp_path}/burst.csv",
        "--trace says when who comes": f"{azure} --sessions 3",
        "leave out --load and": f"{azure} --load poisson",
        "leave out diurnal": "--sessions 3 --load diurnal",
    }
    for place, (message, options) in enumerate(cases.items()):
        try:
            code = main([*SMALL, *options.split()])
        except SystemExit as stopped:
            code = int(str(stopped.code))
        out, err = capsys.readouterr()
        assert code == (2 if place < 6 else 1)
        assert message in err
        assert not out


def test_a_wish_to_stop_that_python_swallows_stops_the_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_it(_plan: Plan) -> None:
        # As in a finaliser, whose exceptions are ignored.
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("loadtest.simulate.compare._compile", compile_it)
    assert main(SMALL) == 130
    out, err = capsys.readouterr()
    assert "stopped; nothing was written" in err
    assert not out
