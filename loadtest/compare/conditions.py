"""Under which conditions an experiment is measured: its options, code and models."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from loadtest.model_files import describe_model

from .deployment import REPO, find_config

_LEFT_OUT = (
    *("output", "preset", "restart", "report_only", "minutes", "objective", "rounds"),
    *("policies", "arm", "loads", "workloads", "metrics_url", "deployment_pid"),
)
"""Options that may differ between pieces of one experiment, or are told otherwise."""


def describe_conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that must be equal for results to belong together."""
    package = Path(__file__).parents[1]
    rooms = ("client/*.py", "load/*.py", "locustfile.py", "report/summary.py")
    return {
        **{k: v for k, v in vars(options).items() if k not in _LEFT_OUT},
        "arms": [asdict(arm) for arm in options.arms],
        # What follows the name may be a secret.
        "header": options.header.partition(":")[0],
        "targets": {
            "ttft_ms": options.ttft_target_ms or None,
            "tpot_ms": options.tpot_target_ms or None,
        },
        "limits": {
            "max_client_cpu": options.max_client_cpu,
            "max_lag_ms": options.max_lag_ms,
        },
        "config_digest": _digest([find_config(options.config)]),
        "files": _digest(options.workloads),
        "client": _digest(f for room in rooms for f in sorted(package.glob(room))),
        "server": _digest(
            file
            for name in ("policies", "serving")
            for file in sorted((REPO / name).rglob("*.py"))
        ),
    }


def describe_models(config: str, settings: Iterable[str]) -> dict[str, Any]:
    """Return name, size and digest of the models of a deployment file, by role."""
    file = find_config(config)
    settled = yaml.safe_load(file.read_text()) if file.is_file() else {}
    names = dict(settled.get("model", {}))
    for setting in settings:
        name, _, value = setting.partition("=")
        names[name.removeprefix("model.")] = value
    models = {}
    for role in ("target", "draft"):
        path = file.parent / Path(str(names.get(role, "-"))).expanduser()
        if path.is_dir():
            models[role] = describe_model(path)
    return models


def _digest(files: Iterable[str | Path]) -> str:
    """Return a short digest of files, of those that are there."""
    digest = hashlib.sha256()
    for file in map(Path, files):
        digest.update(file.name.encode() + b"\0")
        if file.is_file():
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
