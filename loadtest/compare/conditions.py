"""Under which conditions an experiment is measured: its options, code and models."""

import argparse
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from loadtest.environment import digest_code
from serving.offline import find_model

from .deployment import find_config

_LEFT_OUT = (
    *("output", "preset", "summary", "restart", "report_only", "minutes"),
    *("objective", "rounds", "until_half_width"),
    *("policies", "arm", "loads", "workloads"),
)
"""Options that may differ between pieces of one experiment, or are told otherwise."""

_CODE = {
    "client": (
        *("loadtest/client/*.py", "loadtest/load/*.py", "loadtest/locustfile.py"),
        "loadtest/report/summary.py",
    ),
    "server": ("policies/**/*.py", "serving/**/*.py"),
}


def describe_conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that must be equal for results to belong together."""
    files = [find_config(options.config), *map(Path, options.workloads)]
    ttft_ms, tpot_ms = options.ttft_target_ms or None, options.tpot_target_ms or None
    limits = {k: getattr(options, k) for k in ("max_client_cpu", "max_lag_ms")}
    return {
        **{k: v for k, v in vars(options).items() if k not in _LEFT_OUT},
        "arms": [asdict(arm) for arm in options.arms],
        # What follows the name may be a secret.
        "header": options.header.partition(":")[0],
        "targets": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
        "limits": limits,
        "files": {f.name: _digest(f.read_text()) for f in files if f.is_file()},
        **{part: _digest(str(digest_code(*paths))) for part, paths in _CODE.items()},
    }


def find_models(
    config: str, settings: Iterable[str], say: Callable[[str], None]
) -> dict[str, Path]:
    """Return the folders of the models of a deployment file, by role.

    Of a GGUF file it is that into which a server converts it, which is done now; `say`
    is told of it. Models that are not on this machine are left out.
    """
    file = find_config(config)
    settled = yaml.safe_load(file.read_text()) if file.is_file() else {}
    names = dict(settled.get("model", {}))
    for setting in settings:
        name, _, value = setting.partition("=")
        names[name.removeprefix("model.")] = value
    found = {}
    for role in ("target", "draft"):
        path = Path(str(names.get(role, "-"))).expanduser()
        # Paths are the file's own; `package:` is none.
        for place in (file.parent / path, path):
            with suppress(ValueError):
                found[role] = find_model(str(place), say)
                break
    return found


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
