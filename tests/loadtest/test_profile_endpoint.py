"""Where CPU time goes: stacks are grouped, samples weighed, real processes sampled."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from loadtest.http_bench.errors import LoadTestError
from loadtest.profile_endpoint.__main__ import main
from loadtest.profile_endpoint.sampling import (
    NO_PYTHON,
    CpuTimes,
    find_deployment,
    make_profile,
    profile,
)
from loadtest.profile_endpoint.stacks import Frame, group_of, read_stacks
from loadtest.profile_endpoint.table import format_profiles

PACKAGES = "/venv/lib/python3.11/site-packages"
RUN = f"execute_model ({PACKAGES}/vllm/v1/worker/gpu_model_runner.py)"
FORWARD = f"forward ({PACKAGES}/vllm/model_executor/models/llama.py)"
CALL = f"_call_impl ({PACKAGES}/torch/nn/modules/module.py)"
PROPOSE = f"propose ({PACKAGES}/vllm/v1/spec_decode/llm_base_proposer.py)"
LOOP = "_run_once (/usr/lib/python3.11/asyncio/base_events.py)"


def group(*frames: str) -> str:
    """Return the group of a stack given as py-spy writes it."""
    [stack] = read_stacks([";".join(frames) + " 1"])
    return group_of(stack.frames)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([RUN, FORWARD, CALL], "model"),
        ([RUN, PROPOSE, FORWARD, CALL], "drafter"),
        ([RUN], "vLLM: model runner"),
        ([RUN, f"forward ({PACKAGES}/vllm/v1/sample/sampler.py)", CALL], "sampler"),
        (
            ["schedule (/repo/serving/engine/scheduler.py)"],
            "ours: scheduler",
        ),
        (
            [
                "schedule (/repo/serving/engine/scheduler.py)",
                f"schedule ({PACKAGES}/vllm/v1/core/sched/scheduler.py)",
            ],
            "vLLM: scheduler, KV cache, grammars",
        ),
        (["plan (/repo/policies/goodput.py)"], "ours: policies"),
        ([LOOP], "event loop"),
        ([f"_run_event_loop ({PACKAGES}/ray/serve/_private/router.py)"], "event loop"),
        (
            [LOOP, f"send ({PACKAGES}/ray/serve/_private/proxy.py)"],
            "Ray Serve: proxy",
        ),
        (
            [LOOP, f"run_asgi ({PACKAGES}/uvicorn/x.py)"],
            "HTTP (uvicorn, starlette, fastapi)",
        ),
        (
            [LOOP, f"send ({PACKAGES}/ray/serve/_private/proxy.py)", LOOP],
            "event loop",
        ),
        (
            [
                f"stream ({PACKAGES}/vllm/entrypoints/openai/serving.py)",
                f"model_dump_json ({PACKAGES}/pydantic/main.py)",
            ],
            "serialisation (JSON, pydantic, pickle, msgspec)",
        ),
        (
            [f"process ({PACKAGES}/vllm/v1/engine/output_processor.py)"],
            "vLLM: output processing",
        ),
        (
            [f"observe ({PACKAGES}/vllm/v1/spec_decode/metrics.py)"],
            "metrics and logs",
        ),
        (["<lambda> (/elsewhere/odd.py)"], "other: odd.py"),
        ([f"f ({PACKAGES}/left_pad/core.py)"], "other: left_pad"),
        (["f (/usr/lib/python3.11/shutil.py)"], "other: standard library"),
    ],
)
def test_a_stack_belongs_to_its_innermost_part_or_to_the_drafter(
    frames: list[str], expected: str
) -> None:
    assert group(*frames) == expected


def test_stacks_are_read_with_thread_and_count() -> None:
    lines = [
        "thread (123): MainThread;<module> (/a b/c.py:7);f (1) (/a b/d.py) 41\n",
        "thread (0x7F);g 2\n",
        "\n",
    ]
    first, second = read_stacks(lines)
    assert first.thread_id == 123
    assert first.frames == (Frame("<module>", "/a b/c.py"), Frame("f (1)", "/a b/d.py"))
    assert first.num_samples == 41
    assert (second.thread_id, second.frames) == (0x7F, (Frame("g", ""),))


def test_samples_are_weighed_by_their_threads_clocks() -> None:
    stacks = list(
        read_stacks(
            [
                f"thread (1);{RUN};{FORWARD} 30",
                f"thread (1);{RUN} 10",
                # Has as many samples as thread 1, but waited for a core.
                f"thread (2);{LOOP} 40",
                f"thread (3);{LOOP} 5",
                "thread (4) 9",
            ]
        )
    )
    first = CpuTimes(0.0, 10.0, {1: 8.0, 2: 1.0})
    last = CpuTimes(10.0, 19.0, {1: 12.0, 2: 1.5, 4: 3.0})
    one = make_profile("engine", 7, stacks, first, last)
    assert one.cores == pytest.approx(0.9)
    assert one.num_samples == 94
    assert one.groups == pytest.approx(
        {
            NO_PYTHON: 0.45,
            "model": 0.3,
            "vLLM: model runner": 0.1,
            "event loop": 0.05,
        }
    )
    assert next(iter(one.functions)).startswith("forward (vllm/model_executor/")
    text = format_profiles([one, make_profile("raylet", 8, [], first, last)])
    assert "engine (process 7): 0.90 cores" in text
    assert " 33.3%   0.30  model" in text
    assert "without samples, in cores: raylet 0.90" in text


def test_what_a_thread_used_beyond_its_samples_was_outside_python() -> None:
    stacks = list(read_stacks([f"thread (1);{RUN} 30", f"thread (2);{RUN} 30"]))
    first = CpuTimes(0.0, 0.0, {})
    last = CpuTimes(10.0, 6.0, {1: 5.0, 2: 1.0})
    # 50 samples a second: 30 are a share of .06 of ten seconds.
    one = make_profile("proxy", 7, stacks, first, last, 1 / 500)
    assert one.groups == pytest.approx({NO_PYTHON: 0.48, "vLLM: model runner": 0.12})


BUSY = """
import ctypes, json
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # Whoever likes may look.
print("started", flush=True)
while True:
    json.dumps({str(number): [number] * 10 for number in range(1000)}, indent=1)
"""
IDLE = """
import ctypes, time
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def children() -> Iterator[list[psutil.Process]]:
    """A process that writes JSON all the time, and one that sleeps."""
    started = [
        subprocess.Popen(
            # What comes last makes it look like a part of a deployment.
            [sys.executable, "-c", code, "VLLM::EngineCore", str(time.time_ns())],
            stdout=subprocess.PIPE,
        )
        for code in (BUSY, IDLE)
    ]
    try:
        for child in started:
            assert child.stdout is not None
            assert child.stdout.readline() == b"started\n"
        yield [psutil.Process(child.pid) for child in started]
    finally:
        for child in started:
            child.kill()
            child.communicate()


@pytest.mark.parametrize("role", ["engine", "replica"])
def test_a_busy_process_is_sampled_and_an_idle_one_harms_nothing(
    role, children, tmp_path
) -> None:
    busy, idle = profile([(role, one) for one in children], 2, 50, tmp_path)
    assert busy.pid == children[0].pid
    assert busy.cores > 0.05
    shares = {name: cores / busy.cores for name, cores in busy.groups.items()}
    assert shares["serialisation (JSON, pydantic, pickle, msgspec)"] > 0.5
    assert any("json/encoder.py" in name for name in busy.functions)
    assert (idle.num_samples, idle.groups) == (0, {})
    assert (tmp_path / f"{role}-{busy.pid}.txt").exists()


def test_the_command_finds_a_deployment_and_writes_its_profile(
    children, tmp_path, capsys
) -> None:
    pid = str(children[0].pid)
    assert main(["--pid", pid, "--seconds=1", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "profile.txt").read_text()
    assert f"engine (process {pid})" in text
    assert capsys.readouterr().out == text
    [written] = json.loads((tmp_path / "profile.json").read_text())["processes"]
    assert written["cores"] == pytest.approx(sum(written["groups"].values()), rel=0.2)


def test_the_parts_of_a_deployment_are_found_without_its_process(children) -> None:
    found = {process.pid: role for role, process in find_deployment(None)}
    assert all(found[one.pid] == "engine" for one in children)


def test_what_cannot_be_sampled_is_explained(tmp_path, monkeypatch, children) -> None:
    with pytest.raises(LoadTestError, match="no deployment runs below"):
        find_deployment(2**22 + 1)
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LoadTestError, match="--cap-add SYS_PTRACE"):
        profile([("engine", children[0])], 1, 50, tmp_path)
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoadTestError, match="py-spy is not installed"):
        profile([("engine", children[0])], 1, 50, tmp_path)
