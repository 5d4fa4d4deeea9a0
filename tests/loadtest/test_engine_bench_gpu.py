"""The engine benchmark's GPU arms without a GPU: arguments, order, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loadtest.engine_bench import cli, gpu, run
from loadtest.engine_bench.arms import Arm, parse_bench_arm
from loadtest.engine_bench.plan import PRESETS, list_cells
from loadtest.engine_bench.pool import Finished
from loadtest.engine_bench.preload import engine_env
from loadtest.engine_bench.store import Store
from serving.engine_args import engine_kwargs_of
from serving.settings.model import parse_settings
from tests.loadtest.test_engine_bench import measured

GPU = "NVIDIA Stand-in"
ENGINE = gpu.GpuEngineSettings(
    Path("target"), Path("draft"), "bfloat16", 2048, 64, 8192, 1 << 30
)
OWN_CLASSES = {"scheduler_cls", "worker_cls", "additional_config"}


def test_vllms_own_verification_is_an_arm() -> None:
    assert parse_bench_arm("adaptive:4") == Arm("adaptive", 4)
    assert parse_bench_arm("adaptive").name == "adaptive:5"
    assert parse_bench_arm("adaptive").is_rival


def test_the_preset_compares_vllms_own_ways_with_ours_up_to_256_requests() -> None:
    preset = PRESETS["gpu"]
    policies = [arm.policy for arm in preset.arms()]

    assert {"none", "fixed", "adaptive", "tetris", "goodput"} == set(policies)
    # What comes last is compared with all others.
    assert policies[-1] == "goodput"
    assert {cell.concurrency for cell in list_cells(preset.blocks)} == {1, 16, 64, 256}
    assert preset.target_parameters is None
    assert not preset.trace


def test_arms_differ_in_nothing_but_speculation() -> None:
    arms = PRESETS["gpu"].arms()
    args = {arm.name: ENGINE.llm_args(arm) for arm in arms}
    own = OWN_CLASSES | {"speculative_config"}

    shared = [{k: v for k, v in one.items() if k not in own} for one in args.values()]
    assert all(one == shared[0] for one in shared)
    assert "enforce_eager" not in shared[0]
    assert not own & args["none"].keys()
    for name in ("fixed:4", "adaptive:6"):
        assert not OWN_CLASSES & args[name].keys()
    adaptive = args["adaptive:6"]["speculative_config"]
    assert adaptive.pop("enable_adaptive_verification")
    assert adaptive == args["fixed:6"]["speculative_config"]


@pytest.mark.parametrize("name", ["goodput:6", "tetris:2+4", "fixed:3", "none"])
@pytest.mark.parametrize("max_num_seqs", [4, 64])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_engines_are_those_that_a_server_runs(name: str, max_num_seqs: int) -> None:
    arm = parse_bench_arm(name)
    policy: dict[str, Any] = {"name": arm.policy, "method": "draft_model"}
    if arm.speculates:
        policy["draft_tokens"] = arm.draft_tokens
        policy["max_draft_tokens"] = arm.max_depth
    served = engine_kwargs_of(
        parse_settings(
            {
                "model": {"id": "m", "target": "org/target", "draft": "org/draft"},
                "engine": {
                    "device": "gpu",
                    "max_model_len": 2048,
                    "max_num_seqs": max_num_seqs,
                },
                "policy": policy,
                "replicas": {"num_gpus": 1},
            },
            "a.yaml",
        )
    )
    engine = gpu.GpuEngineSettings(
        Path("target"), Path("draft"), "bfloat16", 2048, max_num_seqs, 8192, 1 << 30
    )
    args = engine.llm_args(arm)

    for key in ("scheduler_cls", "worker_cls"):
        assert args.get(key) == served.get(key)
    ours = args.get("additional_config", {}).get("tetris", {})
    theirs = served.get("additional_config", {}).get("tetris", {})
    assert ours == {key: theirs[key] for key in ours}
    assert bool(ours) == bool(theirs)
    speculative = args.get("speculative_config", {})
    for key in ("num_speculative_tokens", "num_speculative_tokens_per_batch_size"):
        assert speculative.get(key) == served.get("speculative_config", {}).get(key)


@pytest.mark.slow  # Imports vLLM.
def test_every_argument_is_one_of_vllms() -> None:
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    for arm in PRESETS["gpu"].arms():
        args = ENGINE.llm_args(arm)
        assert args.keys() <= {field.name for field in fields(EngineArgs)}
        speculative = args.get("speculative_config", {})
        known = {field.name for field in fields(SpeculativeConfig)}
        assert speculative.keys() <= known


def test_no_core_is_pinned_and_no_library_preloaded() -> None:
    env = engine_env({"HOME": "/home", "LD_PRELOAD": "/mine.so"}, (), Path("/repo"))

    assert env["LD_PRELOAD"] == "/mine.so"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not [name for name in env if name.startswith(("OMP_", "KMP_"))]


def bench(folder: Path, *more: str) -> int:
    options = ("--output", str(folder), "--target-parameters", "0")
    return cli.main([*options, "--min-requests", "6", *more])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "adaptive:5"], "or add --device gpu"),
        (["--device", "gpu", "--cpus", "0"], "--cpus: nothing of the kind"),
        (["--device", "gpu", "--trace"], "--trace: nothing of the kind"),
        (["--device", "gpu", "--policies", "cold:8,none"], "cold or warm: nothing"),
        (["--device", "gpu", "--smoke"], "drift-neighbour: nothing of the kind"),
    ],
)
def test_what_a_device_does_not_have_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "find_gpu", lambda: GPU)

    assert bench(tmp_path, *arguments) == 1
    assert message in capsys.readouterr().err


def make_nvml(failure: Exception | None) -> ModuleType:
    """A stand-in for NVIDIA's library."""
    nvml: Any = ModuleType("pynvml")

    def init() -> None:
        if failure is not None:
            raise failure

    nvml.nvmlInit = init
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda handle: GPU
    module: ModuleType = nvml
    return module


def test_a_host_without_a_gpu_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu, "version", lambda package: "0.32.0")
    failure = RuntimeError("NVML Shared Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(failure))

    assert bench(tmp_path, "--device", "gpu") == 1
    error = capsys.readouterr().err
    assert "no NVIDIA GPU is found here (NVML Shared Library Not Found)" in error
    assert not list(tmp_path.iterdir())


def test_the_vllm_for_cpus_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def version(package: str) -> str:
        raise gpu.PackageNotFoundError(package)

    monkeypatch.setattr(gpu, "version", version)

    assert bench(tmp_path, "--device", "gpu") == 1
    assert "set up anew with TETRIS_DEVICE=gpu" in capsys.readouterr().err


def test_the_gpu_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "version", lambda package: "0.32.0")
        patch.setitem(sys.modules, "pynvml", make_nvml(None))
        assert gpu.find_gpu() == GPU


class FakePool:
    """Stands in for the processes: measures nothing, and notes who ran when."""

    notes: Sequence[str] = ()
    num_open = 0

    def __init__(self, folder: Path, cpus: Sequence[int], yardstick: Any) -> None:
        assert tuple(cpus) == ()

    def __enter__(self) -> FakePool:
        FakePool.num_open += 1
        assert FakePool.num_open == 1, "a GPU holds one engine at a time"
        return self

    def __exit__(self, *error: object) -> None:
        FakePool.num_open -= 1

    def start(
        self, settings: Any, arms: Sequence[Arm], eos: int, on_ready: Callable[..., Any]
    ) -> None:
        (arm,) = arms
        assert settings.engine.llm_args(arm)["max_num_batched_tokens"] == 8192
        FakePool.notes = [*FakePool.notes, f"start {arm.name}"]
        on_ready(arm)

    def run(
        self, messages: Mapping[Arm, Mapping[str, Any]], *, neighbour: bool
    ) -> dict[Arm, Finished]:
        ((arm, message),) = messages.items()
        if "max_tokens" not in message:  # Else it warms up.
            FakePool.notes = [*FakePool.notes, f"run {arm.name}"]
        own = {"policy", "round", "workload", "temperature", "concurrency"}
        own |= {"num_turns", "num_disturbed_turns", "waited_s"}
        result = measured(arm.name, 1, 100.0 + arm.max_depth)
        result = {key: value for key, value in result.items() if key not in own}
        if arm.policy in {"fixed", "adaptive"}:
            result |= {"counters": None, "step_time_error": None}
        digests = ["a"] * len(message["prompts"])
        return {arm: Finished(result | {"digests": digests}, 1.0, 1)}


def test_one_engine_at_a_time_goes_through_all_cells_into_the_same_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_gpu", lambda: GPU)
    monkeypatch.setattr(run, "Pool", FakePool)
    monkeypatch.setattr(FakePool, "notes", ())
    names = ("none", "fixed:2", "adaptive:3", "goodput:4")
    options = ("--device", "gpu", "--policies", ",".join(names), "--rounds", "2")
    cells = ("--workloads", "mixed", "--concurrency", "1,2", "--temperatures", "0")

    assert bench(tmp_path, *options, *cells) == 0

    notes = FakePool.notes
    assert len(notes) == 2 * 4 * 3
    for first in range(0, len(notes), 3):
        name = notes[first].removeprefix("start ")
        assert notes[first : first + 3] == [f"start {name}", *[f"run {name}"] * 2]
    assert sorted(notes[:12:3]) == sorted(f"start {name}" for name in names)
    table = (tmp_path / "results.md").read_text()
    assert f"\n\n{GPU}; target" in table
    assert "one engine at a time goes through all cells" in table
    assert "| adaptive:3 | 103 | 103 |" in table
    assert "| adaptive:3 | 1.010 (1.010-1.010) |" in table
    assert Store(tmp_path).conditions()["gpu"] == GPU  # type: ignore[index]


def test_results_of_another_gpu_are_not_gone_on_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "Pool", FakePool)
    options = ("--device", "gpu", "--policies", "none", "--rounds", "1")
    cells = ("--workloads", "mixed", "--concurrency", "1", "--temperatures", "0")
    for name, status in ((GPU, 0), ("Another", 1)):
        monkeypatch.setattr(cli, "find_gpu", lambda name=name: name)
        assert bench(tmp_path, *options, *cells) == status
    assert f"gpu: was {GPU!r}, is 'Another'" in capsys.readouterr().err
