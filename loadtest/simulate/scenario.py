"""Options from files: a scenario's, and what a deployment's settings say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from serving.settings.model import parse_settings

_RIVALS = (
    ("router", "router"),
    ("autoscaler", "autoscaler"),
    ("router", "autoscaler"),
    ("rate", "utilisation"),
    ("staleness-ms", "staleness-ms"),
    ("scale-load", "scale-load"),
)
"""What cannot be given twice, or with the other."""


def read_words(
    scenario: Path | None,
    deployment: Path | None,
    given: Sequence[str],
    known: Collection[str],
) -> list[str]:
    """Return the words of a command line for which files stand.

    Args:
        scenario: Options with their values, or None.
        deployment: Settings as `tetris-serve up` takes them, or None; a scenario can
            name it, and counts more.
        given: Words of the command line itself, which count most: options that must
            not stand beside one of theirs are left out.
        known: Names that options have.

    Raises:
        ValueError: If a file cannot be read, or is no such file.
    """
    data = {} if scenario is None else _read(scenario, "scenario")
    for name in data.keys() - known:
        (near, *_) = [*get_close_matches(name, known, 1), "--help for all of them"]
        raise ValueError(f"scenario {scenario}: no option {name!r}; see {near}")
    named = data.pop("deployment", None)
    if deployment is None and named is not None:
        deployment = Path(named)
    if deployment is not None:
        found = read_deployment(deployment)
        for one, other in _RIVALS:
            if one in data:
                found.pop(other, None)
        data = found | data
    for pair in _RIVALS:
        for one, other in (pair, pair[::-1]):
            if any(word.split("=")[0] == f"--{one}" for word in given):
                data.pop(other, None)
    words = []
    for name, value in data.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}", str(one)]
    return words


def read_deployment(path: Path) -> dict[str, Any]:
    """Return the options that stand for a deployment: batch, drafts and autoscaler.

    Of its model only the device is looked at: `--engine` says how fast a replica is.

    Args:
        path: Settings as `tetris-serve up` takes them, or a chart's values.

    Raises:
        ValueError: If it cannot be served, naming the settings at fault.
    """
    data: Any = _read(path, "deployment")
    source = str(path)
    if "config" in data:
        data, source = data["config"], f"{path}: config"
    if isinstance(data, dict) and isinstance(data.get("engine"), dict):
        # Only vLLM could check it, which takes seconds to load.
        data["engine"].pop("extra", None)
    settings = parse_settings(data, source)
    replicas, policy = settings.replicas, settings.policy
    target, name = replicas.target_ongoing_requests, "target-ongoing"
    if replicas.target_token_ms is not None:
        target, name = replicas.target_token_ms, "ours"
    is_tetris = policy.name == "tetris"
    found = {
        "batch": settings.engine.max_num_seqs,
        "drafts": policy.draft_tokens if is_tetris else policy.num_speculative_tokens,
        "select": policy.name == "goodput",
        "autoscaler": [f"{name}:{target:g}"],
        "replicas": replicas.max,
        "min-replicas": replicas.min,
        "upscale-delay-s": replicas.upscale_delay_s,
        "downscale-delay-s": replicas.downscale_delay_s,
    }
    is_cpu = settings.engine.device == "cpu"
    return found | ({"engine": "cpu-demo-100m"} if is_cpu else {})


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{kind} {path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{kind} {path}: options with their values are expected")
    return data
