"""Whole experiments: the command, real Locust in its own processes, a stand-in."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.client.records import read_records
from loadtest.compare.arms import Arm, parse_arm
from loadtest.compare.cli import PRESETS, main, parse_options
from loadtest.compare.conditions import find_models
from loadtest.compare.deployment import RAY_EXPORT_PERIOD_S, Launcher, find_free_port
from loadtest.compare.runner import Runner, Store, make_load_options
from loadtest.compare.stopping import measure_until
from loadtest.errors import LoadTestError
from loadtest.load.arrivals import arrival_times, parse_load
from loadtest.report.rows import COMPARED, make_ratios
from serving.settings.gguf_files import GgufError

from .stand_in_server import (
    CLOSE,
    DONE,
    WAIT_S,
    StandIn,
    chunk,
    run_stand_in,
    usage,
    wait_for,
)

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = f"{sys.executable} -m tests.loadtest.http.stand_in_server"


@pytest.fixture
def prompts(prompt_file: Path) -> str:
    return f"--workloads={prompt_file}"


def experiment(output: Path, *arguments: str) -> int:
    short = ["--duration", "2", "--lead-in", "0.2", "--warm-up", "0", "--rounds", "1"]
    # Other tests may keep the machine busy: here a late client is no finding.
    calm = ["--max-lag-ms", "5000", "--max-client-cpu", "2", "--max-tokens", "8"]
    return main(["--output", str(output), *short, *calm, *arguments])


def results_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text()))


def test_an_experiment_sends_arms_the_same_and_reports_on_them(
    server, tmp_path, prompts, capsys
):
    with run_stand_in(StandIn(step_s=0.05)) as slow:
        arms = [f"--arm=fast={server.url}", f"--arm=slow={slow.url}/v1"]
        loads = ["--loads", "poisson:10", prompts]
        objectives = ["--objective=fast/slow@tpot_p50_ms<=0.7"]
        status = experiment(tmp_path, *arms, *loads, *objectives, "--warm-up=1")
        seen = len(server.bodies)
        # Everything is measured: the same command only judges.
        missed = ["--objective=slow@tpot_p50_ms<=10", "--warm-up=1"]
        again = experiment(tmp_path, *arms, *loads, *missed)
    assert (status, again) == (0, 1)
    assert len(server.bodies) == seen
    assert "missed: slow@tpot_p50_ms<=10 in slow, " in capsys.readouterr().err
    results = results_in(tmp_path)
    rows = {(row["arm"], row["load"]): row for row in results["rows"]}
    assert set(rows) == {("fast", "poisson:10"), ("slow", "poisson:10")}
    for row in rows.values():
        assert row["num_ok"] == row["num_requests"] > 0
        assert row["acceptance_length"]["median"] == pytest.approx(2.0)
        assert row["verification_success_rate"] == pytest.approx(0.5)
        assert row["replicas_max"] == row["engine_starts"] == 1
        assert row["is_valid"]
    # Eight tokens take seven steps of 50 ms, less what the first one was read late.
    assert rows["slow", "poisson:10"]["tpot_p50_ms"]["median"] >= 45
    for run, arm in zip(results["runs"], (server, slow), strict=True):
        name = "vllm_spec_decode_num_drafts_total"
        assert run["counters"][name] == run["server"]["draft_tokens_accepted"]
        # The same in both runs, after a warm-up that counts into neither.
        assert run["num_sent"] == results["runs"][0]["num_sent"]
        sent = [body["messages"] for body in arm.bodies[-run["num_sent"] :]]
        assert sorted(map(str, sent)) == sorted(
            str(body["messages"]) for body in server.bodies[-len(sent) :]
        )
    report = (tmp_path / "report.html").read_text()
    assert 'src="data:image/png;base64,' in report
    # Self-contained: nothing is loaded from anywhere.
    assert not re.search(r"(src|href)=\"(?!data:)", report)


def test_what_failed_is_listed_what_is_secret_is_not_and_conditions_are_not_mixed(
    tmp_path, capsys
):
    requests = iter(range(10_000))

    def every_third_is_cut(_: Mapping[str, Any]) -> Iterator[object]:
        yield chunk("a")
        yield 0.02
        if next(requests) % 3 == 0:
            yield CLOSE
        yield chunk("b", finish="stop") + usage(1, 2) + DONE

    with run_stand_in(StandIn(every_third_is_cut, key="Bearer very-secret")) as server:
        # A client that may use no processor spoils its run.
        arm = (f"--arm=a={server.url}", "--loads=closed:3", "--max-client-cpu=0")
        assert experiment(tmp_path, *arm) == 1
        assert "give its key with --header" in capsys.readouterr().err
        arm += (f"--header=Authorization: {server.key}",)
        objectives = ("--objective=failure_rate<=.01", "--objective=ttft_p50_ms<=10000")
        assert experiment(tmp_path, *arm, *objectives) == 1
        seen = len(server.bodies)
        told = capsys.readouterr().err
        assert experiment(tmp_path, *arm, "--temperature=1") == 1
        assert len(server.bodies) == seen
    assert "missed: failure_rate<=.01 in a, " in told
    assert "the client was the limit" in told
    assert "temperature: was 0.0, is 1.0" in capsys.readouterr().err
    [row], failed = (results_in(tmp_path)[name] for name in ("rows", "failed_requests"))
    assert row["num_ok"] > 0
    assert row["acceptance_length"] is not None  # Metrics too are shown to the key.
    assert {one["failure"] for one in failed} == {"cut"}
    assert len(failed) == pytest.approx(seen / 3, abs=2)
    assert {one["id"] for one in failed} < set(server.ids)
    report = (tmp_path / "report.html").read_text()
    assert all(one["id"] in report for one in failed)
    assert "% of a core" in report
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"very-secret" in text for text in written)


def test_workers_together_send_what_one_process_would(server, tmp_path, prompts):
    # With three processes one has no user of the closed load, and is not waited for.
    load = ("--loads=closed:2,poisson:12", "--processes=3", prompts)
    assert experiment(tmp_path, f"--arm=a={server.url}", *load) == 0
    assert len(server.ids) == len(set(server.ids))
    closed, poisson = (
        read_records(tmp_path / run["records"]) for run in results_in(tmp_path)["runs"]
    )
    # Nothing is sent before the moment on which all workers agreed.
    assert min(outcome.scheduled_s for outcome in closed.outcomes) >= 0
    seed = f"0/1/{prompts.partition('=')[2]} poisson:12"
    expected = arrival_times(parse_load("poisson:12"), 2.0, seed)
    sent = sorted(outcome.scheduled_s for outcome in poisson.outcomes)
    assert sent == pytest.approx(expected, abs=1e-5)
    names = {sample.process for sample in poisson.client}
    assert names == {"client 0", "client 1", "client 2"}


def test_results_tell_of_the_models_that_a_server_serves(tmp_path, monkeypatch):
    """A target that is a GGUF file inside a package is that into which it is made."""

    def convert(file, _):
        assert file == "package:a/x.gguf"
        return tmp_path / "converted"

    def find_gguf(name):
        if not name.startswith("package:"):
            raise GgufError(name)
        return name

    monkeypatch.setattr("serving.offline.convert", convert)
    monkeypatch.setattr("serving.offline.find_gguf", find_gguf)
    config = tmp_path / "config.yaml"
    config.write_text("model: {target: 'package:a/x.gguf', draft: ./draft}")
    assert find_models(str(config), [], print).keys() == {"target"}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").touch()
    assert find_models(str(config), [], print) == {
        "target": tmp_path / "converted",
        "draft": tmp_path / "draft",
    }
    assert find_models(str(config), ["model.target=a/hub"], print).keys() == {"draft"}


def test_a_server_gets_a_port_that_nobody_takes_before_it_listens():
    """Linux hands out ports from 32768 unasked, Ray and Serve take some below."""
    last = find_free_port(29_990)
    with socket.create_server(("127.0.0.1", last)):
        assert last not in {find_free_port(29_990) for _ in range(200)}
    ports = [find_free_port() for _ in range(500)]
    assert 20_000 <= min(ports) <= max(ports) < 30_000


def test_a_command_is_started_and_leaves_nothing_behind(tmp_path):
    launcher = Launcher(tmp_path)
    with launcher.run(parse_arm(f"a=cmd:{STAND_IN} {{port}}"), print) as running:
        assert running.endpoint.why_silent() is None
        assert running.metrics_urls == (f"{running.endpoint.url}/metrics",)
        process = psutil.Process(running.pid)
    assert not process.is_running()
    # One that fails is explained with its own words.
    arm = parse_arm("a=cmd:sh -c 'echo no such model; exit 3' {port}")
    with pytest.raises(LoadTestError, match="no such model"), launcher.run(arm, print):
        pass


def test_ctrl_c_ends_the_run_and_what_it_started(server, tmp_path):
    command = [sys.executable, "-m", "serving.cli", "bench", "http"]
    command += [
        f"--output={tmp_path}",
        f"--arm=a={server.url}",
        "--loads=closed:1",
        "--warm-up=0",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        wait_for(lambda: server.bodies or run.poll() is not None)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        message = run.communicate(timeout=WAIT_S)[1]
    assert run.returncode == 130
    assert "goes on from there" in message
    assert children
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]


NONE = "--policies=none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure"),
        (["--policies=eagle"], "no policy"),
        (["--arm=a=cmd:serve"], "must hold {port}"),
        (["--arm=a=vllm:tetris"], "vLLM alone has no policy tetris"),
        ([NONE, "--objective=fast"], "no objective"),
        (["--arm=a=http://127.0.0.1:9"], "start the server"),
        ([NONE, "--workloads=mixd"], "no workload"),
        (["--policies=none,none"], "same name"),
        ([NONE, "--lead-in=60"], "leaves nothing"),
        (["--arm=a=http://x", "--soak"], "have us start it"),
    ],
)
def test_experiments_that_cannot_work_are_explained(
    tmp_path, capsys, arguments, message
):
    try:
        status = main(["--output", str(tmp_path), *arguments])
    except SystemExit as exit_:  # What the parser sees.
        status = exit_.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arm", "arguments"),
    [
        ("none", "--policy none"),
        ("fixed:2", "--policy fixed --set policy.draft_tokens=2"),
        ("goodput:6", "--policy goodput --set policy.max_draft_tokens=6"),
        (
            "fixed:2:probabilistic",
            "--policy fixed --set policy.draft_tokens=2 "
            "--set policy.draft_sampling=probabilistic",
        ),
        (
            "a=tetris:3+1",
            "--policy tetris --set policy.draft_tokens=3 "
            "--set policy.max_draft_tokens=4",
        ),
    ],
)
def test_a_policy_becomes_settings_of_our_server(arm, arguments):
    expected = [*arguments.split(), "--set", "policy.audit=0"]
    assert parse_arm(arm).up_arguments() == expected


def test_vllm_alone_is_started_with_the_very_options_of_our_server(tmp_path):
    launcher = Launcher(tmp_path, "configs/tiny.yaml", ["engine.max_num_seqs=3"])
    ours, plain = (
        launcher._command(parse_arm(arm), 1234) for arm in ("fixed:3", "a=vllm:fixed:3")
    )
    assert {"policy.draft_tokens=3", "engine.max_num_seqs=3"} <= set(plain)
    assert ["vllm" if word == "up" else word for word in ours] == plain


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_experiments(tmp_path, preset):
    arguments = ["--output", str(tmp_path), "--preset", preset, "--rounds", "7"]
    options = parse_options(arguments)
    assert options.rounds == 7
    assert options.arms
    assert options.soak is (preset == "soak")
    assert make_load_options(options).duration >= 15


class Rounds(Runner):
    """Stands in for a runner: ours is as fast as vLLM's, give or take some percent."""

    def __init__(self, store: Store, arms: Sequence[Arm], noise: float) -> None:
        self.asked = list[int]()
        self._store, self._arms, self._noise = store, arms, noise

    def measure(self, minutes: float | None = None) -> bool:
        assert minutes is None
        begin = 1 + (self.asked[-1] if self.asked else 0)
        self.asked.append(self.rounds)
        figures = dict.fromkeys(COMPARED, 1.0)
        place = {"workload": "mixed", "load": "closed:1"}
        for number in range(begin, self.rounds + 1):
            for arm in self._arms:
                off = self._noise * (-1) ** number * (not arm.is_plain_vllm)
                own = {"output_tokens_per_s": 100 * (1 + off), "arm": arm.name}
                self._store.append_record(figures | place | own | {"round": number})
        return True


@pytest.mark.parametrize(
    ("noise", "more", "asked"),
    [
        (0.01, [], [4]),
        # Half-widths: t times .05 over the root of the rounds less one.
        (0.05, [], [4, 8, 12, 16]),
        (0.2, [], [4, 8, 12, 16, 20, 24]),
        (0.2, ["--rounds=6"], [4, 6]),
        (0.2, ["--rounds=2"], [2]),
    ],
)
def test_overhead_stops_when_the_ratios_of_ours_over_vllms_are_known(
    tmp_path, noise, more, asked
):
    given = ["--output", str(tmp_path), "--preset", "overhead", *more]
    options, store = parse_options(given), Store(tmp_path)
    runner = Rounds(store, options.arms, noise)
    assert measure_until(runner, store, options)
    assert runner.asked == asked
    ratios = make_ratios(store.runs())
    assert {("ours", "vllm"), ("ours2", "vllm2")} <= {
        (one["arm"], one["against"]) for one in ratios
    }


def test_the_overhead_is_measured_with_nobody_looking_and_rays_own_period(tmp_path):
    options = parse_options(["--output", str(tmp_path), "--preset", "overhead"])
    assert options.unwatched
    runner = Runner(options, Store(tmp_path))
    assert runner._launcher.export_period_s == RAY_EXPORT_PERIOD_S
